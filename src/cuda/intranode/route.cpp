#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <new>
#include <optional>

#include "cuda/call/channel_tables.hpp"
#include "cuda/call/routing.hpp"
#include "cuda/call/tuning.hpp"
#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/driver/driver.hpp"
#include "cuda/intranode/calls.hpp"
#include "cuda/intranode/route_params.hpp"
#include "cuda/memory/memory_checks.hpp"
#include "node/pause_core.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

/// Polls of the outcome between two looks at everything else, where the host also offers its core to other ranks of the
/// machine: some 10 us, so that neither the system nor CUDA is called all the time while a program runs ahead.
constexpr int kPollsBetweenLooks = 256;

/// Builds the Routing of one route on one rank. Methods in the order in which they are called.
class RouteBuilder {
 public:
  RouteBuilder(const RouteCall& call, const RankParams& ranks, std::shared_ptr<TableMemory> memory)
      : call_(call), ranks_(ranks), memory_(std::move(memory)), state_(std::make_shared<CudaRouting>()) {}

  bool bounded() const { return call_.options.max_recv_rows > 0 || call_.options.layout == Layout::kSlab; }
  Status prepare(RouteHistory& history, std::size_t shared_limit);
  Status prepare_host(const std::shared_ptr<PinnedMemory>& pinned, DeviceReport* report, bool captured,
                      std::int64_t timeout_ns);
  cudaError_t launch_steps(const Launch& launch, const Parts& parts);
  /// The counts of an exact route are known: its source table becomes as large as they say. False: this rank's place
  /// step has found that its table was too small, and is to be launched again, with the one there is now.
  Result<bool> fit_source();
  cudaError_t launch_place_step(const Launch& launch, const Parts& parts, bool announces);
  CudaRouting& state() { return *state_; }
  std::shared_ptr<CudaRouting> finish();

 private:
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

  const RouteCall& call_;
  const RankParams& ranks_;
  std::shared_ptr<TableMemory> memory_;
  RouteParams params_;
  std::shared_ptr<CudaRouting> state_;
  std::int64_t source_rows_ = -1;  ///< that the source table has room for; -1: there is none yet
};

Status RouteBuilder::prepare(RouteHistory& history, std::size_t shared_limit) {
  const auto num_experts = static_cast<int>(std::min(call_.options.num_experts, kMaxExperts));
  const std::size_t shared_bytes =
      std::max(exchange_shared_bytes(ranks_.num_ranks, num_experts), place_shared_bytes(ranks_.num_ranks, num_experts));
  if (call_.options.num_experts > kMaxExperts || shared_bytes > shared_limit) {
    return Status(
        ErrorCode::kUnsupported,
        fmt::format("route: num_experts is {}; the CUDA backend takes up to {}, and as many as its counts of {} "
                    "ranks and experts fit {} bytes of shared memory on this GPU",
                    call_.options.num_experts, kMaxExperts, ranks_.num_ranks, shared_limit));
  }
  Result<std::shared_ptr<const Placement>> placement = history.placements.find(call_.placement);
  if (!placement.ok()) return placement.status();
  const std::int64_t num_tokens = call_.num_tokens;
  const RouteBlocks blocks = RouteBlocks::of(num_tokens);

  CudaRouting& state = *state_;
  Result<BuiltHomes> homes =
      prepare_homes(call_, *memory_, {ranks_.rank, ranks_.num_ranks, (*placement)->tables.owner});
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
  // An exact route has time for what rests when it waits for the counts, and none before.
  Result<std::shared_ptr<std::byte>> tables = memory_->take(RoutingTables::at(nullptr, shape).size_bytes, !bounded());
  if (!tables.ok()) return tables.status();
  state.memory = *tables;
  state.tables = RoutingTables::at(tables->get(), shape);
  return bounded() ? prepare_source(bounded_rows()) : guess_source(history.most_rows);
}

Status RouteBuilder::prepare_source(std::int64_t num_rows) {
  Result<std::shared_ptr<std::byte>> source = memory_->take(source_bytes(num_rows), true);
  if (!source.ok()) return source.status();
  state_->source_memory = *source;
  source_rows_ = num_rows;
  set_rows(num_rows);
  return {};
}

Status RouteBuilder::guess_source(std::int64_t known_rows) {
  const SourceGuess guess{.num_ranks = ranks_.num_ranks,
                          .num_tokens = call_.num_tokens,
                          .num_topk = call_.num_topk,
                          .num_local_experts = static_cast<std::int64_t>(state_->local_expert_ids.size()),
                          .expert_alignment = call_.options.expert_alignment,
                          .by_token = call_.options.layout == Layout::kTokens,
                          .known_rows = known_rows};
  const std::int64_t num_rows = guess.num_rows();
  Result<std::shared_ptr<std::byte>> source = memory_->take(source_bytes(num_rows), true);
  if (source.ok()) {
    state_->source_memory = *source;
    source_rows_ = num_rows;
    return {};
  }
  // There may still be memory for the rows that come.
  const ErrorCode code = source.status().code();
  return code == ErrorCode::kCapacity || code == ErrorCode::kSystem ? Status() : source.status();
}

Result<bool> RouteBuilder::fit_source() {
  const std::int64_t num_rows = state_->num_used_rows;
  if (num_rows > source_rows_) {
    if (Status status = prepare_source(num_rows); !status.ok()) return status;
    return false;
  }
  memory_->shrink(state_->source_memory, source_bytes(num_rows));  // nobody writes to rows beyond
  set_rows(num_rows);
  return true;
}

Status RouteBuilder::prepare_host(const std::shared_ptr<PinnedMemory>& pinned, DeviceReport* report, bool captured,
                                  std::int64_t timeout_ns) {
  params_.host.fault = &pinned->on_device(report)->fault;
  if (captured) return {};
  const Result<RouteWords> words = state_->expect_words({memory_, pinned, report}, ranks_.num_ranks, timeout_ns);
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

cudaError_t RouteBuilder::launch_steps(const Launch& launch, const Parts& parts) {
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
  params.max_blocks =
      most_blocks(call_.options.num_sms, {.num_sms = parts.num_sms, .num_ranks = parts.ranks.num_ranks});
  params.placement = state_->placement->tables;
  if (state_->homes.present()) params.placement.homes = state_->homes.tables();
  params.tables = state_->tables;
  params.counters = counter_tables(call_.options.counters);
  params.source_offset = source_offset();
  params.source_rows = source_rows_;
  cudaError_t error = state_->homes.launch(launch.stream);
  if (error == cudaSuccess) error = launch_exchange(params, launch.stream);
  return error == cudaSuccess ? launch_place_step(launch, parts, false) : error;
}

cudaError_t RouteBuilder::launch_place_step(const Launch& launch, const Parts& parts, bool announces) {
  PlaceParams params;
  params.route = params_;
  params.announces = announces;
  params.entry.agreement = launch.agreement;
  params.entry.record_number = launch.record_number;
  params.entry.tables_offset = source_offset();
  params.source = reinterpret_cast<std::int32_t*>(state_->source_memory.get());
  params.num_bounded_rows = bounded() ? state_->num_recv_rows : 0;
  // Not in a graph: its nodes may be copied or updated by programs and drivers that know no such edge.
  params.overlaps = parts.has_bulk && !announces && !launch.captured;
  return launch_place(params, launch.stream);
}

std::shared_ptr<CudaRouting> RouteBuilder::finish() {
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
    // A peer that gave up will not come, whenever this rank's stream may come to the route.
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
  /// Asks the caller for them: it has time now.
  EarlyLaunch(const Parts& parts, const RouteCall& call, const CudaRouting& state)
      : parts_(parts), state_(state), call_((*call.while_waiting)()) {
    if (call_ != nullptr) status_ = check_channel_tables_memory(*call_, state.num_tokens, *parts.arena);
  }

  /// Of the tables. The route goes on without them: other ranks wait for it.
  const Status& status() const { return status_; }

  /// early: behind a last step of the route that may be launched again.
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

Status refuse(Context& context, const RouteCall& call, const Status& status) {
  return context.refuse(call.record, call.stream, status, [&context](const Launch& launch) {
    RouteParams params;
    params.ranks = context.parts().ranks;
    params.record_number = launch.record_number;
    return launch_exchange(params, launch.stream);
  });
}

Result<std::shared_ptr<RoutingState>> run(Context& context, RouteHistory& history, const RouteCall& call) {
  if (Status status = status_of(call.record); !status.ok()) return refuse(context, call, status);
  const Parts& parts = context.parts();
  RouteBuilder builder(call, parts.ranks, parts.memory);
  const Result<bool> captured = context.check_stream(to_string(Operation::kRoute), call.stream);
  Status status = captured.status();
  if (status.ok() && *captured && !builder.bounded()) {
    status =
        Status(ErrorCode::kInvalidArgument,
               "route: the stream is being captured, and the host must wait for the counts; give max_recv_rows, or "
               "layout kSlab, or route before the capture");
  }
  if (status.ok()) status = check_route_memory(call, *parts.arena);
  if (status.ok()) status = builder.prepare(history, parts.shared_limit);
  if (status.ok()) status = builder.prepare_host(parts.pinned, parts.report, *captured, context.timeout_ns());
  if (status.ok() && *captured) status = mark_not_routed("route", builder.state().tables.summary, parts.stream->get());
  if (!status.ok()) return refuse(context, call, status);

  Result<Launch> launch = context.begin(call.record, static_cast<cudaStream_t>(call.stream.handle), *captured);
  if (!launch.ok()) return refuse(context, call, launch.status());
  CudaRouting& state = builder.state();
  std::optional<EarlyLaunch> tables;
  cudaError_t error = builder.launch_steps(*launch, parts);
  if (error == cudaSuccess && !builder.bounded()) {
    if (call.while_waiting != nullptr) error = tables.emplace(parts, call, state).launch(launch->stream, true);
    parts.memory->look_through();
    status = await_counts(context, *launch, state.host);
    if (status.ok()) {
      state.adopt_result();
      state.exact_rows = true;
      history.most_rows = std::max(history.most_rows, state.num_used_rows);
      const Result<bool> fits = builder.fit_source();
      // The exchange has taken place: a rank that cannot go on must not leave the others waiting.
      if (!fits.ok()) status = context.fail(fits.status());
      if (fits.ok() && !*fits) {
        if (error == cudaSuccess) error = builder.launch_place_step(*launch, parts, true);
        if (error == cudaSuccess && tables) error = tables->launch(launch->stream, false);
      }
    }
  }
  Status ended = context.end(*launch, error, "route");
  if (!status.ok()) return status;
  if (!ended.ok()) return ended;
  if (tables && !tables->status().ok()) return tables->status();
  return std::shared_ptr<RoutingState>(builder.finish());
}

}  // namespace

Result<std::shared_ptr<RoutingState>> intranode::route(Context& context, RouteHistory& history,
                                                       const RouteCall& call) try {
  const DeviceGuard guard(context.parts().device);
  if (!guard.status().ok()) return context.fail(guard.status());
  return run(context, history, call);
} catch (const std::bad_alloc&) {
  return context.out_of_memory(Operation::kRoute);
}

}  // namespace ferry::cuda
