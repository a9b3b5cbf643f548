#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <optional>

#include "cuda/call/channel_tables.hpp"
#include "cuda/call/group_call.hpp"
#include "cuda/call/routing.hpp"
#include "cuda/call/tuning.hpp"
#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/driver.hpp"
#include "cuda/intranode/calls.hpp"
#include "cuda/intranode/route_params.hpp"
#include "cuda/memory/memory_checks.hpp"
#include "cuda/placement/homes.hpp"
#include "node/pause_core.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

/// Polls of the outcome between two looks at everything else, at which the host also offers its core to other ranks of
/// the machine: some 10 us, so that a program that runs ahead does not call the system and CUDA all the time.
constexpr int kPollsBetweenLooks = 256;

/// One route on one rank, and the Routing that it makes. Public methods in the order in which they are called.
class Route {
 public:
  Route(Context& context, RouteHistory& history, const RouteCall& call)
      : context_(context), history_(history), call_(call), state_(std::make_shared<CudaRouting>()) {}

  bool bounded() const { return call_.options.max_recv_rows > 0 || call_.options.layout == Layout::kSlab; }
  Status prepare(const CallStream& stream);
  cudaError_t launch(const Launch& launch);
  cudaError_t launch_refusal(const Launch& launch, const CallRecord& refused) const;
  /// Shrinks the source table of an exact route to the rows that were counted. False: the table was too small, which
  /// this rank's place step has found too; there is a new table, with which the step must be launched again.
  Result<bool> fit_source();
  cudaError_t launch_place_step(const Launch& launch, bool announces);
  CudaRouting& state() { return *state_; }
  std::shared_ptr<CudaRouting> finish();

 private:
  Status prepare_tables();
  Status prepare_host(bool captured);
  Status prepare_source(std::int64_t num_rows);
  Status guess_source(std::int64_t known_rows);
  void set_rows(std::int64_t num_rows) {
    state_->num_recv_rows = num_rows;
    state_->num_used_rows = num_rows;
    state_->source = ConstTensorView(state_->source_memory.get(), DType::kInt32, {num_rows, 2});
  }
  std::int64_t source_offset() const {
    if (source_rows_ < 0) return 0;
    return state_->source_memory.get() - ranks_.peer_bases[ranks_.rank];
  }
  std::int64_t bounded_rows() const {
    return call_.options.max_recv_rows > 0
               ? call_.options.max_recv_rows
               : static_cast<std::int64_t>(state_->local_expert_ids.size()) * call_.options.slab_capacity;
  }

  Context& context_;
  RouteHistory& history_;
  const RouteCall& call_;
  const Parts& parts_ = context_.parts();
  const RankParams& ranks_ = parts_.ranks;
  RouteParams params_;
  std::shared_ptr<CudaRouting> state_;
  std::int64_t source_rows_ = -1;  ///< that the source table has room for; -1: there is none yet
};

Status Route::prepare(const CallStream& stream) {
  if (stream.captured && !bounded()) {
    return Status(ErrorCode::kInvalidArgument,
                  "route: the stream is being captured, and the host must wait for the counts; give max_recv_rows, or "
                  "layout kSlab, or route before the capture");
  }
  Status status = check_route_memory(call_, *parts_.arena);
  if (status.ok()) status = prepare_tables();
  if (status.ok()) status = prepare_host(stream.captured);
  if (!status.ok() || !stream.captured) return status;
  return mark_not_routed("route", state_->tables.summary, parts_.stream->get());
}

Status Route::prepare_tables() {
  const std::size_t shared_limit = parts_.shared_limit;
  const std::int64_t most_experts = most_experts_of(call_);
  const auto num_experts = static_cast<int>(std::min(most_experts, kMaxExperts));
  const std::size_t shared_bytes = std::max(exchange_shared_bytes(ranks_.num_ranks, num_experts, num_experts),
                                            place_shared_bytes(ranks_.num_ranks, num_experts));
  if (most_experts > kMaxExperts || shared_bytes > shared_limit) {
    return Status(
        ErrorCode::kUnsupported,
        fmt::format("route: num_experts is {}; the CUDA backend takes up to {}, and as many as its counts of {} "
                    "ranks and experts fit {} bytes of shared memory on this GPU",
                    most_experts, kMaxExperts, ranks_.num_ranks, shared_limit));
  }
  Result<std::shared_ptr<const Placement>> placement = history_.placements.find(call_.placement);
  if (!placement.ok()) return placement.status();
  const std::int64_t num_tokens = call_.num_tokens;
  const RouteBlocks blocks = RouteBlocks::of(num_tokens);

  CudaRouting& state = *state_;
  Result<BuiltHomes> homes =
      prepare_homes(call_, *parts_.memory, {ranks_.rank, ranks_.num_ranks, (*placement)->tables.owner});
  if (!homes.ok()) return homes.status();
  state.homes = std::move(*homes);
  state.placement = *placement;
  state.local_expert_ids = state.placement->local_expert_ids;
  state.num_tokens = num_tokens;
  state.num_topk = call_.num_topk;
  state.num_experts = call_.options.num_experts;
  state.layout = call_.options.layout;
  state.num_blocks = blocks.num_blocks;
  state.tokens_per_block = blocks.tokens_per_block;
  const RoutingTables::Shape shape{.num_ranks = to_size(ranks_.num_ranks),
                                   .num_tokens = to_size(num_tokens),
                                   .num_topk = to_size(call_.num_topk),
                                   .num_experts = to_size(state.num_experts),
                                   .num_local_experts = state.local_expert_ids.size(),
                                   .num_blocks = to_size(blocks.num_blocks),
                                   .weights = call_.topk_weights.present()};
  // An exact route looks through resting memory while it waits for the counts, not here.
  Result<std::shared_ptr<std::byte>> tables =
      parts_.memory->take(RoutingTables::at(nullptr, shape).size_bytes, !bounded());
  if (!tables.ok()) return tables.status();
  state.memory = *tables;
  state.tables = RoutingTables::at(tables->get(), shape);
  return bounded() ? prepare_source(bounded_rows()) : guess_source(history_.most_rows);
}

Status Route::prepare_source(std::int64_t num_rows) {
  Result<std::shared_ptr<std::byte>> source = parts_.memory->take(source_bytes(num_rows), true);
  if (!source.ok()) return source.status();
  state_->source_memory = *source;
  source_rows_ = num_rows;
  set_rows(num_rows);
  return {};
}

Status Route::guess_source(std::int64_t known_rows) {
  const SourceGuess guess{.num_ranks = ranks_.num_ranks,
                          .num_tokens = call_.num_tokens,
                          .num_topk = call_.num_topk,
                          .num_local_experts = static_cast<std::int64_t>(state_->local_expert_ids.size()),
                          .expert_alignment = call_.options.expert_alignment,
                          .by_token = call_.options.layout == Layout::kTokens,
                          .known_rows = known_rows};
  const std::int64_t num_rows = guess.num_rows();
  Result<std::shared_ptr<std::byte>> source = parts_.memory->take(source_bytes(num_rows), true);
  if (source.ok()) {
    state_->source_memory = *source;
    source_rows_ = num_rows;
    return {};
  }
  // There may still be memory for the actual rows.
  const ErrorCode code = source.status().code();
  return code == ErrorCode::kCapacity || code == ErrorCode::kSystem ? Status() : source.status();
}

Result<bool> Route::fit_source() {
  const std::int64_t num_rows = state_->num_used_rows;
  if (num_rows > source_rows_) {
    if (Status status = prepare_source(num_rows); !status.ok()) return status;
    return false;
  }
  parts_.memory->shrink(state_->source_memory, source_bytes(num_rows));  // no rank writes to rows beyond
  set_rows(num_rows);
  return true;
}

Status Route::prepare_host(bool captured) {
  const std::shared_ptr<PinnedMemory>& pinned = parts_.pinned;
  params_.host.fault = &pinned->on_device(parts_.report)->fault;
  if (captured) return {};
  const Result<RouteWords> words =
      state_->expect_words({parts_.memory, pinned, parts_.report}, ranks_.num_ranks, context_.timeout_ns());
  if (!words.ok()) return words.status();
  params_.host_words = *words;
  params_.host.result = pinned->on_device(state_->host.result);
  if (bounded()) {
    state_->count_calls_apart();
  } else {
    params_.host.fault = pinned->on_device(state_->host.fault);
  }
  return {};
}

cudaError_t Route::launch(const Launch& launch) {
  RouteParams& params = params_;
  params.ranks = ranks_;
  params.agreement = launch.agreement;
  params.record_number = launch.record_number;
  params.topk_idx = call_.topk_idx.data;
  params.wide_ids = call_.topk_idx.dtype == DType::kInt64;
  params.weights = static_cast<const float*>(call_.topk_weights.data);
  params.num_tokens = call_.num_tokens;
  params.num_topk = call_.num_topk;
  params.num_experts = static_cast<int>(call_.options.num_experts);
  params.num_local_experts = static_cast<int>(state_->local_expert_ids.size());
  params.layout = call_.options.layout;
  params.expert_alignment = call_.options.expert_alignment;
  params.slab_capacity = call_.options.slab_capacity;
  params.max_recv_rows = call_.options.max_recv_rows;
  params.tokens_per_block = state_->tokens_per_block;
  params.num_blocks = state_->num_blocks;
  params.max_blocks = most_blocks(call_.options.num_sms, {.num_sms = parts_.num_sms, .num_ranks = ranks_.num_ranks});
  params.placement = state_->placement->tables;
  if (state_->homes.present()) params.placement.homes = state_->homes.tables();
  params.tables = state_->tables;
  params.counters = counter_tables(call_.options.counters);
  params.source_offset = source_offset();
  params.source_rows = source_rows_;
  cudaError_t error = state_->homes.launch(launch.stream);
  if (error == cudaSuccess) error = launch_exchange(params, launch.stream);
  return error == cudaSuccess ? launch_place_step(launch, false) : error;
}

cudaError_t Route::launch_refusal(const Launch& launch, const CallRecord& /*refused*/) const {
  RouteParams params;
  params.ranks = ranks_;
  params.record_number = launch.record_number;
  return launch_exchange(params, launch.stream);
}

cudaError_t Route::launch_place_step(const Launch& launch, bool announces) {
  PlaceParams params;
  params.route = params_;
  params.announces = announces;
  params.entry.agreement = launch.agreement;
  params.entry.record_number = launch.record_number;
  params.entry.tables_offset = source_offset();
  params.source = reinterpret_cast<std::int32_t*>(state_->source_memory.get());
  params.num_bounded_rows = bounded() ? state_->num_recv_rows : 0;
  // Not in a graph: programs and drivers without support for such an edge may copy or update its nodes.
  params.overlaps = parts_.has_bulk && !announces && !launch.captured;
  return launch_place(params, launch.stream);
}

std::shared_ptr<CudaRouting> Route::finish() {
  CudaRouting& state = *state_;
  const auto num_local = static_cast<std::int64_t>(state.local_expert_ids.size());
  state.num_used_rows_view = ConstTensorView(&state.tables.summary->num_used_rows, DType::kInt32, {1});
  state.rows_per_expert_view = ConstTensorView(state.tables.rows_per_expert, DType::kInt32, {num_local});
  state.expert_rows_view = ConstTensorView(state.tables.expert_rows, DType::kInt64, {state.num_experts});
  if (state.layout != Layout::kTokens) {
    state.row_offsets_view = ConstTensorView(state.tables.row_offsets, DType::kInt64, {num_local + 1});
  }
  state.slots = ConstTensorView(state.tables.slots, DType::kInt32, {state.num_tokens, state.num_topk});
  state.topk_idx = ConstTensorView(state.tables.ids, DType::kInt64, {state.num_tokens, state.num_topk});
  if (call_.topk_weights.present()) {
    state.topk_weights = ConstTensorView(state.tables.weights, DType::kFloat32, {state.num_tokens, state.num_topk});
  }
  return std::move(state_);
}

/// Waits until the exchange of an exact route is known.
Status await_counts(Context& context, const Launch& launch, const HostResult& host) {
  const RelaxedCapture relaxed;
  CountsDeadline deadline(host, context.timeout_ns());
  context.expect_wait();
  for (int polls = 1; host.state() == 0; ++polls) {
    node::pause_core();
    if (polls % kPollsBetweenLooks != 0) continue;
    if (Status status = context.check_lost(); !status.ok()) return status;
    if (const Result<bool> idle = is_idle(launch.stream); !idle.ok()) return context.fail(idle.status());
    if (Status status = context.check_interrupt("route"); !status.ok()) return status;
    // A peer that gave up does not make the route, whenever this rank's stream reaches it.
    if (deadline.expired() || (!host.started() && context.parts().sync->peers().reported_error())) {
      return context.give_up_on(context.parts().ranks.rank, "route: this rank's GPU did not run the exchange");
    }
    sched_yield();
  }
  return host.state() == 1 ? Status() : context.describe(*host.fault, "route");
}

/// Tables by channel that are written while the host waits for the counts.
class EarlyLaunch {
 public:
  /// Asks the caller for the tables while the host waits in any case.
  EarlyLaunch(const Parts& parts, const RouteCall& call, const CudaRouting& state)
      : parts_(parts), state_(state), call_((*call.while_waiting)()) {
    if (call_ != nullptr) status_ = check_channel_tables_memory(*call_, state.num_tokens, *parts.arena);
  }

  /// Error of the tables. The route continues without them, because other ranks wait for it.
  const Status& status() const { return status_; }

  /// `early`: after a last step of the route that may be launched again.
  cudaError_t launch(cudaStream_t stream, bool early) const {
    if (call_ == nullptr || !status_.ok()) return cudaSuccess;
    ChannelTablesParams params = channel_tables_params(parts_.ranks, state_, *call_);
    params.early = early;
    return launch_channel_tables(params, stream);
  }

 private:
  const Parts& parts_;
  const CudaRouting& state_;
  const ChannelTablesCall* call_;
  Status status_;
};

Result<std::shared_ptr<RoutingState>> run(Context& context, RouteHistory& history, const RouteCall& call) {
  Route route(context, history, call);
  const Result<Launch> launch = begin_call({context, call.record, call.stream}, route);
  if (!launch.ok()) return launch.status();
  const Parts& parts = context.parts();
  CudaRouting& state = route.state();
  std::optional<EarlyLaunch> tables;
  Status status;
  cudaError_t error = route.launch(*launch);
  if (error == cudaSuccess && !route.bounded()) {
    if (call.while_waiting != nullptr) error = tables.emplace(parts, call, state).launch(launch->stream, true);
    parts.memory->look_through();
    status = await_counts(context, *launch, state.host);
    if (status.ok()) {
      state.adopt_result();
      state.exact_rows = true;
      history.most_rows = std::max(history.most_rows, state.num_used_rows);
      const Result<bool> fits = route.fit_source();
      // The exchange has taken place: a rank that cannot go on must not leave the others waiting.
      if (!fits.ok()) status = context.fail(fits.status());
      if (fits.ok() && !*fits) {
        if (error == cudaSuccess) error = route.launch_place_step(*launch, true);
        if (error == cudaSuccess && tables) error = tables->launch(launch->stream, false);
      }
    }
  }
  Status ended = context.end(*launch, error, "route");
  if (!status.ok()) return status;
  if (!ended.ok()) return ended;
  if (tables && !tables->status().ok()) return tables->status();
  return std::shared_ptr<RoutingState>(route.finish());
}

}  // namespace

Result<std::shared_ptr<RoutingState>> intranode::route(Context& context, RouteHistory& history, const RouteCall& call) {
  return on_gpu(context, Operation::kRoute, [&] { return run(context, history, call); });
}

}  // namespace ferry::cuda
