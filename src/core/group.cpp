#include "ferry/group.hpp"

#include <fmt/format.h>

#include "core/backend.hpp"
#include "core/call_gate.hpp"
#include "core/call_numbers.hpp"
#include "core/checks.hpp"
#include "core/expert_placement.hpp"
#include "core/group_log.hpp"
#include "core/latency_calls.hpp"
#include "core/present_ranks.hpp"
#include "core/tile_signals.hpp"

namespace ferry {
namespace {

Status no_routing(std::string_view operation) {
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("{}: the Routing is empty; pass the one that route returned", operation));
}

Status other_group(std::string_view operation) {
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("{}: the Routing was made by another group; call route on this one", operation));
}

Status destroyed(std::string_view operation) {
  return Status(ErrorCode::kInvalidArgument, fmt::format("{}: this group was destroyed; create a new one", operation));
}

Status suspended(std::string_view operation) {
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("{}: this group is suspended; call renew, with the members' next view", operation));
}

Status absent(std::string_view operation, int rank) {
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("{}: takes all ranks of the group, and rank {} is absent; call renew when a process has "
                            "its place, or make calls of latency mode",
                            operation, rank),
                rank);
}

/// Tables that a route writes along with its own.
struct EarlyCall {
  ChannelTablesCall call;
  Status status;

  /// Null: none.
  const ChannelTablesCall* of(const EarlyTables& wanted, ChannelTablesShape shape) {
    if (wanted.num_channels == 0) return nullptr;
    if (wanted.out.source_token.present()) shape.num_rows = wanted.out.source_token.extent(0);
    status = check_channel_tables(shape, wanted.num_channels, wanted.out, call);
    return status.ok() ? &call : nullptr;
  }
};

/// Tokens and rows of a call; none of a call that this rank's checks refused.
RecordedShape shape_of(const DispatchCall& call) { return {call.x.num_rows, -1, call.x.row_bytes, call.x.dtype}; }
RecordedShape shape_of(const CombineCall& call) {
  return {call.out_x.num_rows, -1, call.out_x.row_bytes, call.out_x.dtype};
}

/// Phase of a recorded call that has returned ok: on a GPU its exchange may be yet to come.
CallPhase done_phase(const Backend& backend) {
  return backend.takes_streams() ? CallPhase::kLaunched : CallPhase::kReturned;
}

}  // namespace

std::string_view Group::backend() const { return backend_ ? backend_->name() : std::string_view("none (destroyed)"); }

Result<Buffer> Group::allocate(std::size_t bytes) {
  if (Status status = check_usable("allocate"); !status.ok()) return noted(status);
  Result<Buffer> buffer = backend_->allocate(bytes);
  if (!buffer.ok()) return noted(buffer.status());
  return buffer;
}

MemoryUsage Group::memory_usage() const { return can_be_asked() ? backend_->memory_usage() : MemoryUsage(); }

Status Group::trim() {
  CallPass pass;
  if (Status status = enter("trim", pass); !status.ok()) return noted(status);
  return noted(backend_->trim());
}

std::vector<std::int64_t> Group::wait_times_ns() const {
  return can_be_asked() ? backend_->wait_times_ns() : std::vector<std::int64_t>();
}

NetworkUsage Group::network_usage() const { return can_be_asked() ? backend_->network_usage() : NetworkUsage(); }

/// Accessors return empty values in a forked copy: the threads that would answer are not there, and locks may be held
/// forever.
bool Group::can_be_asked() const { return backend_ != nullptr && !gate_->is_copy(); }

Status Group::check_usable(std::string_view operation) const {
  if (gate_->is_copy()) return refuse_copy(operation);
  if (is_suspended_) return suspended(operation);
  return backend_ ? Status() : destroyed(operation);
}

/// Logs an error that a public call returns.
Status Group::noted(Status status) const {
  errors_->note(status);
  return status;
}

/// Admits a call of this group; the call holds `pass` while it runs.
Status Group::enter(std::string_view operation, CallPass& pass) {
  Status status = take_turn(operation, pass);
  return status.ok() && is_suspended_ ? suspended(operation) : status;
}

/// As enter, for a call that takes all ranks. All that are present get the same error.
Status Group::enter_together(std::string_view operation, CallPass& pass) {
  Status status = enter(operation, pass);
  for (int rank = 0; status.ok() && rank < num_ranks(); ++rank) {
    if (!is_present(*options_, rank)) status = absent(operation, rank);
  }
  return status;
}

/// As enter, in a suspended group too.
Status Group::take_turn(std::string_view operation, CallPass& pass) {
  if (gate_->is_copy()) return refuse_copy(operation);
  if (!pass.wait_for(*gate_)) {
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format(
            "{}: it was called from within another call of this group, by code that runs while that call waits (a "
            "callback, or a signal's handler) and may call nothing of the group but allocate; make "
            "the call after the other one has returned",
            operation));
  }
  return backend_ ? Status() : destroyed(operation);
}

Status Group::check_stream(std::string_view operation, Stream stream) const {
  if (stream.handle == nullptr || backend_->takes_streams()) return {};
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("{}: the stream is {}, expected null: backend \"{}\" has no streams", operation,
                            stream.handle, backend_->name()));
}

Result<Routing> Group::route(const RouteInput& in, const RouteOptions& options, Stream stream,
                             const std::function<EarlyTables()>& while_waiting) {
  CallPass pass;
  if (Status status = enter_together("route", pass); !status.ok()) return noted(status);
  RecordedScope recorded(backend_->recorder(), RecordedOperation::kRoute);
  numbers_->settle();
  numbers_->count();
  RouteCall call;
  call.record.operation = Operation::kRoute;
  Status status = check_stream("route", stream);
  if (status.ok()) status = check_route(in, options, *placements_, backend_->memory_is_on_host(), call);
  if (status.ok()) {
    call.placement->describe(call.record);
  } else {
    call.record.set_status(status);
  }
  call.stream = stream;
  EarlyCall early;
  const std::function<const ChannelTablesCall*()> make_early = [&] {
    return early.of(while_waiting(), {options.layout, num_ranks(), 0, call.num_tokens});
  };
  if (while_waiting) call.while_waiting = &make_early;
  const ExpertPlacement* const placed = status.ok() ? call.placement.get() : nullptr;
  call.record.fields = {call.num_topk,
                        options.num_experts,
                        placed != nullptr ? placed->num_placed() : 0,
                        placed != nullptr ? placed->agreed_choice() : 0,
                        placed != nullptr && placed->on_device ? 1 : 0,
                        static_cast<std::int64_t>(options.layout),
                        options.expert_alignment,
                        options.slab_capacity,
                        options.max_tokens,
                        in.topk_weights.present() ? 1 : 0,
                        placed != nullptr ? placed->hash : 0};
  recorded.describe({call.num_tokens, call.num_topk});
  Result<std::shared_ptr<RoutingState>> state = backend_->route(call);
  // The host of an exact route has waited until all ranks have made it.
  const bool exact = options.max_recv_rows == 0 && options.max_tokens == 0 && options.layout != Layout::kSlab;
  const CallPhase done = exact ? CallPhase::kReturned : done_phase(*backend_);
  if (!recorded.end(state.status(), done).ok()) return noted(state.status());
  (*state)->group_identity = identity_;
  (*state)->call_number = numbers_->number_of_route(**state);
  (*state)->num_logical_experts = options.num_experts;
  if (!early.status.ok()) return noted(early.status);
  return Routing(std::move(*state));
}

Status Group::check_routing(std::string_view operation, const Routing& routing) const {
  if (routing.state_ == nullptr) return no_routing(operation);
  if (routing.state_->group_identity == identity_) return check_received(operation, *routing.state_);
  return other_group(operation);
}

Status Group::dispatch(const Routing& routing, const DispatchInput& in, const DispatchOutput& out, Stream stream,
                       const DispatchOptions& options) {
  CallPass pass;
  if (Status status = enter_together("dispatch", pass); !status.ok()) return noted(status);
  RecordedScope recorded(backend_->recorder(), RecordedOperation::kDispatch);
  DispatchCall call;
  call.record.operation = Operation::kDispatch;
  call.stream = stream;
  const Status belongs = check_routing("dispatch", routing);
  numbers_->count_on(belongs.ok() ? routing.state_.get() : nullptr);
  if (belongs.ok()) call.routing = routing.state_;
  call.zero_padding = options.zero_padding;
  call.clear_if_refused = options.clear_if_refused;
  call.kernel = options.kernel;
  Status status = check_stream("dispatch", stream);
  if (status.ok()) status = belongs;
  if (status.ok()) status = check_dispatch(*routing.state_, in, out, options, call);
  if (!status.ok()) {
    call.record.set_status(status);
  } else {
    const bool scales = out.scales.present();
    call.record.fields = {call.routing->call_number,
                          call.x.row_bytes,
                          static_cast<std::int64_t>(call.x.dtype),
                          static_cast<std::int64_t>(call.quantize),
                          scales ? out.scales.extent(1) : 0,
                          scales ? static_cast<std::int64_t>(out.scales.dtype) : 0,
                          scales ? 1 : 0,
                          out.topk_idx.present() ? 1 : 0,
                          out.topk_weights.present() ? 1 : 0,
                          out.source.present() ? 1 : 0};
  }
  recorded.describe(shape_of(call));
  return noted(recorded.end(backend_->dispatch(call), done_phase(*backend_)));
}

Status Group::combine(const Routing& routing, const CombineInput& in, const CombineOutput& out, Stream stream,
                      const CombineOptions& options) {
  CallPass pass;
  if (Status status = enter_together("combine", pass); !status.ok()) return noted(status);
  RecordedScope recorded(backend_->recorder(), RecordedOperation::kCombine);
  CombineCall call;
  call.record.operation = Operation::kCombine;
  call.stream = stream;
  const Status belongs = check_routing("combine", routing);
  numbers_->count_on(belongs.ok() ? routing.state_.get() : nullptr);
  if (belongs.ok()) call.routing = routing.state_;
  call.kernel = options.kernel;
  Status status = check_stream("combine", stream);
  if (status.ok()) status = belongs;
  if (status.ok()) status = check_combine(*routing.state_, in, out, options, call);
  if (status.ok()) status = check_wire_reach(call, topology(), options_->verify);
  if (!status.ok()) {
    call.record.set_status(status);
  } else {
    call.record.fields = {call.routing->call_number,
                          call.x.row_bytes,
                          static_cast<std::int64_t>(call.x.dtype),
                          options.weighted ? 1 : 0,
                          in.weights.present() ? 1 : 0,
                          static_cast<std::int64_t>(options.wire_format)};
  }
  recorded.describe(shape_of(call));
  return noted(recorded.end(backend_->combine(call), done_phase(*backend_)));
}

Result<Routing> Group::latency_dispatch(const LatencyDispatchInput& in, const LatencyDispatchOutput& out,
                                        const LatencyDispatchOptions& options, Stream stream) {
  constexpr std::string_view kName = "latency_dispatch";
  CallPass pass;
  if (Status status = enter(kName, pass); !status.ok()) return noted(status);
  RecordedScope recorded(backend_->recorder(), RecordedOperation::kLatencyDispatch);
  numbers_->count_latency();
  LatencyDispatchCall call;
  call.record.operation = Operation::kLatencyDispatch;
  call.stream = call.route.stream = call.dispatch.stream = stream;
  Status status = check_stream(kName, stream);
  if (status.ok()) {
    status = check_latency_dispatch(in, out, options, *placements_, backend_->memory_is_on_host(), call);
  }
  if (status.ok()) status = check_wait_times(kName, options.wait_times_ns, num_ranks(), call.wait_times_ns);
  if (status.ok()) status = latency_calls_->check_dispatch(call);
  if (status.ok()) {
    call.route.placement->describe(call.record);
    const bool scales = out.scales.present();
    const ExpertPlacement& placed = *call.route.placement;
    call.record.fields = {call.route.num_topk,
                          options.num_experts,
                          placed.num_placed(),
                          placed.agreed_choice(),
                          placed.on_device ? 1 : 0,
                          options.max_tokens,
                          options.slab_capacity,
                          in.topk_weights.present() ? 1 : 0,
                          call.dispatch.x.row_bytes,
                          static_cast<std::int64_t>(call.dispatch.x.dtype),
                          static_cast<std::int64_t>(options.quantize),
                          scales ? num_scales(out.scales) : 0,
                          scales ? static_cast<std::int64_t>(out.scales.dtype) : 0,
                          placed.hash};
  } else {
    call.record.set_status(status);
  }
  recorded.describe({call.route.num_tokens, call.route.num_topk, call.dispatch.x.row_bytes, call.dispatch.x.dtype});
  Result<std::shared_ptr<RoutingState>> state = backend_->latency_dispatch(call);
  if (!recorded.end(state.status(), done_phase(*backend_)).ok()) return noted(state.status());
  (*state)->group_identity = identity_;
  numbers_->number_dispatch(**state);
  (*state)->num_logical_experts = options.num_experts;
  latency_calls_->sent(call, *state);
  return Routing(std::move(*state));
}

Status Group::latency_combine(const Routing& routing, const LatencyCombineInput& in, const LatencyCombineOutput& out,
                              Stream stream, const LatencyCombineOptions& options) {
  constexpr std::string_view kName = "latency_combine";
  CallPass pass;
  if (Status status = enter(kName, pass); !status.ok()) return noted(status);
  RecordedScope recorded(backend_->recorder(), RecordedOperation::kLatencyCombine);
  numbers_->count_latency();
  LatencyCombineCall call;
  CombineCall& combine = call.combine;
  combine.record.operation = Operation::kLatencyCombine;
  combine.stream = stream;
  const Status belongs = check_routing(kName, routing);
  if (belongs.ok()) combine.routing = routing.state_;
  Status status = check_stream(kName, stream);
  if (status.ok()) status = belongs;
  if (status.ok()) status = latency_calls_->check_combine(*routing.state_, options.split);
  if (status.ok()) status = check_latency_combine(*routing.state_, in, out, options, call);
  if (status.ok()) status = as_error_of(kName, check_wire_reach(combine, topology(), options_->verify));
  if (status.ok()) status = check_signals_reach(call.signals, options_->verify, options_->mask_lost_ranks);
  if (status.ok()) status = check_wait_times(kName, options.wait_times_ns, num_ranks(), call.wait_times_ns);
  if (!status.ok()) {
    combine.record.set_status(status);
  } else {
    combine.record.fields = {numbers_->number_of_combine(*combine.routing),
                             combine.x.row_bytes,
                             static_cast<std::int64_t>(combine.x.dtype),
                             static_cast<std::int64_t>(options.order),
                             in.topk_weights.present() ? 1 : 0,
                             static_cast<std::int64_t>(options.wire_format)};
  }
  recorded.describe(shape_of(combine));
  Status sent = recorded.end(backend_->latency_combine(call), done_phase(*backend_));
  if (sent.ok()) latency_calls_->sent(call);
  return noted(sent);
}

Status Group::latency_receive(const Routing& routing, Stream stream) {
  constexpr std::string_view kName = "latency_receive";
  CallPass pass;
  if (Status status = enter(kName, pass); !status.ok()) return noted(status);
  if (Status status = check_stream(kName, stream); !status.ok()) return noted(status);
  if (routing.state_ == nullptr) return noted(no_routing(kName));
  if (routing.state_->group_identity != identity_) return noted(other_group(kName));
  if (Status status = LatencyCalls::check_receive(*routing.state_); !status.ok()) return noted(status);
  RecordedScope recorded(backend_->recorder(), RecordedOperation::kLatencyReceive);
  bool made = false;
  Status status = recorded.end(backend_->latency_receive({routing.state_, stream}, made), done_phase(*backend_));
  if (made) latency_calls_->received(routing.state_, status);
  return noted(status);
}

Status Group::check_mask(std::string_view operation, Stream stream) const {
  if (!options_->mask_lost_ranks) {
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: this group does not mask ranks; create it with GroupOptions::mask_lost_ranks", operation));
  }
  return check_stream(operation, stream);
}

Status Group::latency_update_mask(int rank, bool masked, Stream stream) {
  constexpr std::string_view kName = "latency_update_mask";
  CallPass pass;
  if (Status status = enter(kName, pass); !status.ok()) return noted(status);
  if (Status status = check_mask(kName, stream); !status.ok()) return noted(status);
  if (Status status = check_masked_rank(rank, topology_); !status.ok()) return noted(status);
  return noted(backend_->update_mask(rank, masked, stream));
}

Status Group::latency_query_mask(const TensorView& out, Stream stream) {
  constexpr std::string_view kName = "latency_query_mask";
  CallPass pass;
  if (Status status = enter(kName, pass); !status.ok()) return noted(status);
  if (Status status = check_mask(kName, stream); !status.ok()) return noted(status);
  if (Status status = check_mask_view(out, num_ranks()); !status.ok()) return noted(status);
  return noted(backend_->query_mask(static_cast<std::int32_t*>(out.data), stream));
}

Status Group::latency_clear_mask(Stream stream) {
  constexpr std::string_view kName = "latency_clear_mask";
  CallPass pass;
  if (Status status = enter(kName, pass); !status.ok()) return noted(status);
  if (Status status = check_mask(kName, stream); !status.ok()) return noted(status);
  return noted(backend_->update_mask(kEveryRank, false, stream));
}

Status Group::channel_tables(const Routing& routing, int num_channels, const ChannelTables& out, Stream stream) {
  CallPass pass;
  if (Status status = enter("channel_tables", pass); !status.ok()) return noted(status);
  Status status = check_stream("channel_tables", stream);
  if (status.ok()) status = check_routing("channel_tables", routing);
  if (!status.ok()) return noted(status);
  ChannelTablesCall call;
  call.routing = routing.state_.get();
  call.stream = stream;
  const RoutingState& state = *routing.state_;
  status =
      check_channel_tables({state.layout, num_ranks(), state.num_recv_rows, state.num_tokens}, num_channels, out, call);
  return noted(status.ok() ? backend_->channel_tables(call) : status);
}

Status Group::wait(Stream stream) {
  CallPass pass;
  if (Status status = enter("wait", pass); !status.ok()) return noted(status);
  if (Status status = check_stream("wait", stream); !status.ok()) return noted(status);
  RecordedScope recorded(backend_->recorder(), RecordedOperation::kWait);
  return noted(recorded.end(backend_->wait(stream)));
}

Status Group::poll() {
  if (gate_->is_copy()) return noted(refuse_copy("poll"));
  CallPass pass;
  if (!pass.try_take(*gate_)) return {};  // the running call reports its own errors
  if (Status status = check_usable("poll"); !status.ok()) return noted(status);
  return noted(backend_->poll());
}

Status Group::destroy() {
  CallPass pass;
  if (Status status = take_turn("destroy", pass); !status.ok()) return noted(status);
  // A suspended rank has left.
  RecordedScope recorded(is_suspended_ ? nullptr : backend_->recorder(), RecordedOperation::kDestroy);
  Status status = recorded.end(is_suspended_ ? Status() : backend_->destroy());
  is_suspended_ = false;
  backend_.reset();
  if (status.ok()) log_line(LogLevel::kInfo, log_rank(topology_), "destroy: all ranks are done");
  return noted(status);
}

}  // namespace ferry
