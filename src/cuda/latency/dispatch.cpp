#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "core/checks.hpp"
#include "cuda/call/group_call.hpp"
#include "cuda/call/wait_times.hpp"
#include "cuda/driver/cuda_call.hpp"
#include "cuda/latency/calls.hpp"
#include "cuda/latency/kept_allocator.hpp"
#include "cuda/latency/kernels.hpp"
#include "cuda/latency/memory.hpp"
#include "cuda/memory/memory_checks.hpp"
#include "cuda/placement/homes.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

constexpr std::string_view kName = "latency_dispatch";
/// Kernels count rows in 32 bits, in steps of all their threads.
constexpr std::int64_t kMostSlabRows = std::numeric_limits<std::int32_t>::max() - kMaxCallBlocks * kDispatchThreads;
constexpr std::int64_t kWarpsPerBlock = kDispatchThreads / 32;
/// One block that reports and one that moves rows.
constexpr int kLeastReceiveBlocks = 2;
/// Two rows for each thread.
constexpr std::int64_t kGapRowsPerBlock = 2 * kDispatchThreads;

LatencyRow row_of(const DispatchCall& call) {
  LatencyRow row;
  row.x_bytes = call.out_x.row_bytes;
  if (call.out_scales.present()) {
    row.num_scales = static_cast<int>(num_scales(call.out_scales));
    row.scale_bytes = static_cast<int>(size_bytes(call.out_scales.dtype));
  }
  return row;
}

/// Bytes of the rows that experts return for those of a dispatch.
std::int64_t combined_row_bytes(const DispatchCall& call) {
  return size_bytes(call.x.dtype) == 1 ? 2 * call.x.row_bytes : call.x.row_bytes;
}

SetNeed need_of(const LatencyDispatchCall& call, int num_ranks) {
  return SetNeed::of_dispatch(num_ranks, call.max_tokens, call.route.num_topk, row_of(call.dispatch).used_bytes());
}

SlabScales slab_scales(const TensorView& scales, std::int64_t slab_capacity) {
  if (!scales.present()) return {};
  const int last = scales.num_dims - 1;
  const std::int64_t row_stride = scales.stride(last - 1);
  return {static_cast<std::byte*>(scales.data), last == 2 ? scales.stride(0) : slab_capacity * row_stride, row_stride,
          scales.stride(last)};
}

ConstScales const_scales(const ConstTensorView& scales) {
  if (!scales.present()) return {};
  return {static_cast<const std::byte*>(scales.data), scales.stride(0), scales.stride(1)};
}

/// Sets the views of the Routing; all of them derive from its tables.
void set_views(LatencyRouting& routing, bool weights, int num_ranks) {
  const LatencyTables& tables = routing.latency;
  const auto num_local = static_cast<std::int64_t>(routing.local_expert_ids.size());
  routing.num_used_rows_view = ConstTensorView(&tables.summary->num_used_rows, DType::kInt32, {1});
  routing.rows_per_expert_view = ConstTensorView(tables.rows_per_expert, DType::kInt32, {num_local});
  routing.row_offsets_view = ConstTensorView(tables.row_offsets, DType::kInt64, {num_local + 1});
  routing.source = ConstTensorView(tables.source, DType::kInt32, {routing.num_recv_rows, 2});
  routing.source_ranges = ConstTensorView(tables.source_ranges, DType::kInt32, {num_local, num_ranks, 2});
  routing.slots = ConstTensorView(tables.slots, DType::kInt32, {routing.num_tokens, routing.num_topk});
  routing.topk_idx = ConstTensorView(tables.ids, DType::kInt64, {routing.num_tokens, routing.num_topk});
  if (weights) {
    routing.topk_weights = ConstTensorView(tables.weights, DType::kFloat32, {routing.num_tokens, routing.num_topk});
  }
}

/// Marks a captured Routing as one that no graph has filled yet.
Status clear_captured(const LatencyTables& tables, cudaStream_t own_stream) {
  constexpr std::string_view kClearing = "latency_dispatch: clearing a captured Routing";
  const RelaxedCapture relaxed;
  Status status;
  for (SentCall* sent : {tables.dispatch, tables.combine}) {
    if (status.ok()) status = runtime_status(cudaMemsetAsync(sent, 0, sizeof(*sent), own_stream), kClearing);
  }
  return status.ok() ? mark_not_routed(kName, tables.summary, own_stream) : status;
}

/// Longest time that a wait may take before it ends by itself.
std::int64_t longest_wait_ns(const Parts& parts, std::int64_t timeout_ns) {
  return std::max(timeout_ns, static_cast<std::int64_t>(kPatience * parts.mask_timeout_ns));
}

/// Prepares the host memory in which the receive half reports the counts.
Status prepare_host(const Parts& parts, std::int64_t timeout_ns, LatencyRouting& routing) {
  Result<RouteResultTables> host = routing.expect_counts(
      {parts.memory, parts.pinned, parts.report}, parts.latency_ranks.num_ranks, longest_wait_ns(parts, timeout_ns));
  if (!host.ok()) return host.status();
  routing.host_tables = *host;
  return {};
}

/// Gives each row as many warps as there are, and takes blocks for all of them. Returns the number of all blocks.
int share_receive(const LatencyParams& call, DispatchReceiveRows& params, int most_blocks) {
  const std::int64_t most_rows = call.ranks.num_ranks * call.max_tokens;
  const std::int64_t most_receivers = most_blocks - params.first_receiver;
  const std::int64_t num_warps = most_receivers * kWarpsPerBlock;
  while (params.warps_per_row < kMaxWarpsPerRow && 2 * params.warps_per_row * most_rows <= num_warps &&
         params.warps_per_row * kReceiveStepBytes < params.row.x_bytes) {
    params.warps_per_row *= 2;
  }
  const std::int64_t rows_per_block = kWarpsPerBlock / params.warps_per_row;
  const std::int64_t per_source = (call.max_tokens + rows_per_block - 1) / rows_per_block;
  const std::int64_t wanted = call.ranks.num_ranks * per_source;
  // To clear the rest of a slab takes all blocks.
  if (params.zero_padding || wanted >= most_receivers) return params.first_receiver + static_cast<int>(most_receivers);
  const std::int64_t num_slab_rows = call.num_local_experts * call.slab_capacity;
  const std::int64_t gap_blocks = (num_slab_rows + kGapRowsPerBlock - 1) / kGapRowsPerBlock;
  params.num_gap_blocks = static_cast<int>(std::min(gap_blocks, most_receivers - wanted));
  return params.first_receiver + static_cast<int>(wanted) + params.num_gap_blocks;
}

/// Divides the work of a whole call among blocks. Blocks that only receive have everything ready when rows come; so if
/// there are not many fewer of these, the others only send. In any case the blocks that receive, and the first, are at
/// most those that may wait. The others are before them: they end as soon as they have sent, whatever the peers do.
void share_blocks(LatencyDispatchParams& params, const BlockLimits& limits) {
  DispatchSendParams& send = params.send;
  // One block counts, and reports.
  send.num_senders = static_cast<int>(std::clamp<std::int64_t>(send.call.num_tokens, 1, limits.most - 1));
  send.call.num_blocks = 1 + send.num_senders;
  const int others = limits.most - send.call.num_blocks;
  const int most_receivers = limits.most_waiting - 1;
  int& first = params.receive.first_receiver;
  if (2 * others >= limits.most - 1) {
    first = send.call.num_blocks;
  } else if (limits.most > limits.most_waiting) {
    first = limits.most - most_receivers;
  }
  const int most = std::min(limits.most, first + most_receivers);
  send.call.num_blocks = std::max(send.call.num_blocks, share_receive(send.call, params.receive, most));
}

/// Divides the work of two halves among blocks. Returns the number of blocks of the receive half.
int share_half_blocks(LatencyDispatchParams& params, const BlockLimits& limits) {
  DispatchSendParams& send = params.send;
  send.num_senders = static_cast<int>(std::clamp<std::int64_t>(send.call.num_tokens, 1, limits.most - 1));
  send.call.num_blocks = 1 + send.num_senders;
  return share_receive(send.call, params.receive, limits.most_waiting);
}

/// The first block of a receive half that copies rows, behind one that reports and those that take what far ranks have
/// sent: one for each far rank, but few among all. Where there are two blocks in all, the first does both.
int first_receiver_of(int num_far, int most_waiting) {
  constexpr int kShare = 8;
  return most_waiting <= kLeastReceiveBlocks ? 1 : 1 + std::clamp(most_waiting / kShare, 1, num_far);
}

/// share_half_blocks() in groups of several nodes.
int share_blocks_over_nodes(LatencyDispatchParams& params, const BlockLimits& limits, const FarLayout& layout) {
  const LatencyDispatchParams given = params;
  const int num_small_blocks = share_half_blocks(params, limits);
  int& num_blocks = params.send.call.num_blocks;
  params.send.call.small = num_blocks < limits.most && is_small_over_nodes(params, num_small_blocks, layout);
  if (params.send.call.small) {
    ++num_blocks;  // the last one grants
    return num_small_blocks;
  }
  params = given;
  params.receive.first_receiver = first_receiver_of(layout.num_far(), limits.most_waiting);
  return share_half_blocks(params, limits);
}

}  // namespace

Status LatencyMode::check_dispatch(const LatencyDispatchCall& call) const {
  const Parts& parts = context_.parts();
  const std::int64_t most_experts = most_experts_of(call.route);
  if (most_experts > kMaxExperts || call.max_tokens > kMaxLatencyTokens) {
    return Status(ErrorCode::kUnsupported,
                  fmt::format("{}: num_experts is {} and max_tokens is {}; the CUDA backend takes up to {} and {}",
                              kName, most_experts, call.max_tokens, kMaxExperts, kMaxLatencyTokens));
  }
  Status status = check_room(kName, need_of(call, ranks().num_ranks));
  if (!status.ok()) return status;
  const std::int64_t num_rows = call.num_local_experts * call.route.options.slab_capacity;
  if (num_rows > kMostSlabRows) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: slab_capacity is {}: {} experts have {} rows, expected at most {}", kName,
                              call.route.options.slab_capacity, call.num_local_experts, num_rows, kMostSlabRows));
  }
  status = check_route_memory(call.route, *parts.arena);
  if (status.ok()) status = check_wait_times_memory(kName, call.wait_times_ns, *parts.arena);
  if (status.ok()) status = check_dispatch_memory(call.dispatch, *parts.arena);
  return as_error_of(kName, status);
}

Result<std::shared_ptr<LatencyRouting>> LatencyMode::begin_routing(const LatencyDispatchCall& call, bool captured) {
  const Parts& parts = context_.parts();
  const RouteCall& route = call.route;
  Result<std::shared_ptr<const Placement>> placement = placements_.find(route.placement);
  if (!placement.ok()) return placement.status();
  Result<BuiltHomes> homes =
      prepare_homes(route, *parts.memory, {ranks().rank, ranks().num_ranks, (*placement)->tables.owner});
  if (!homes.ok()) return homes.status();
  auto routing = std::allocate_shared<LatencyRouting>(KeptAllocator<LatencyRouting>());
  routing->homes = std::move(*homes);
  routing->placement = std::move(*placement);
  routing->local_expert_ids = routing->placement->local_expert_ids;
  routing->num_tokens = route.num_tokens;
  routing->num_topk = route.num_topk;
  routing->num_experts = route.options.num_experts;
  routing->layout = Layout::kSlab;
  routing->max_tokens = call.max_tokens;
  routing->slab_capacity = route.options.slab_capacity;
  routing->num_recv_rows = call.num_local_experts * route.options.slab_capacity;
  routing->num_used_rows = routing->num_recv_rows;
  const LatencyTables::Shape shape{.num_ranks = to_size(ranks().num_ranks),
                                   .num_tokens = to_size(route.num_tokens),
                                   .max_tokens = to_size(call.max_tokens),
                                   .num_topk = to_size(route.num_topk),
                                   .num_local_experts = routing->local_expert_ids.size(),
                                   .num_slab_rows = to_size(routing->num_recv_rows),
                                   .weights = route.topk_weights.present(),
                                   .far = over_nodes()};
  // The host clears a captured Routing at once.
  const std::size_t tables_bytes = LatencyTables::at(nullptr, shape).size_bytes;
  Result<std::shared_ptr<std::byte>> tables =
      captured ? parts.memory->take(tables_bytes) : parts.memory->take_for_calls(tables_bytes);
  if (!tables.ok()) return tables.status();
  routing->memory = std::move(*tables);
  routing->latency = LatencyTables::at(routing->memory.get(), shape);
  routing->tables.summary = routing->latency.summary;
  set_views(*routing, route.topk_weights.present(), ranks().num_ranks);
  Status status = captured ? clear_captured(routing->latency, parts.stream->get())
                           : prepare_host(parts, context_.timeout_ns(), *routing);
  if (!status.ok()) return status;
  if (captured) {
    std::erase_if(captured_, [](const auto& one) { return one.expired(); });
    captured_.push_back(routing);
  }
  return routing;
}

Status LatencyMode::forget_calls() {
  in_flight_.clear();
  const Parts& parts = context_.parts();
  const DeviceGuard guard(parts.device);
  Status status = guard.status();
  for (const std::weak_ptr<LatencyRouting>& one : captured_) {
    const std::shared_ptr<LatencyRouting> routing = one.lock();
    if (routing != nullptr && status.ok()) status = clear_captured(routing->latency, parts.stream->get());
  }
  if (!status.ok()) return status;
  const RelaxedCapture relaxed;
  return runtime_status(cudaStreamSynchronize(parts.stream->get()), "renew: clearing captured Routings");
}

cudaError_t LatencyMode::launch_send(const LatencyDispatchParams& params, cudaStream_t stream) {
  if (over_nodes()) {
    far_->expect_posts();
    return launch_nodes_dispatch_send({params.send, far_->params()}, has_homes_or_counters(params.receive), stream);
  }
  return launch_dispatch_send(params, mask_, stream);
}

cudaError_t LatencyMode::launch_receive(const DispatchReceiveParams& params, cudaStream_t stream) const {
  if (over_nodes()) return launch_nodes_dispatch_receive({params, far_->params()}, stream);
  return launch_dispatch_receive(params, mask_, stream);
}

Result<std::shared_ptr<RoutingState>> LatencyMode::make_dispatch(const LatencyDispatchCall& call) {
  // A rank without landing memory cannot report its refusal to the others; no rank has any then.
  if (!has_memory()) return check_room(kName, need_of(call, ranks().num_ranks));
  const DispatchCall& rows = call.dispatch;
  std::shared_ptr<LatencyRouting> made;
  std::optional<LatencyDispatchParams> params;
  int num_receive_blocks = 0;
  bool captured = false;
  const auto prepare = [&](const CallStream& stream) -> Status {
    captured = stream.captured;
    if (Status status = check_dispatch(call); !status.ok()) return status;
    Result<std::shared_ptr<LatencyRouting>> begun = begin_routing(call, captured);
    if (!begun.ok()) return as_error_of(kName, begun.status());
    made = std::move(*begun);
    LatencyRouting& routing = *made;
    if (over_nodes()) {
      if (Status status = returns_of(kName, routing, CombineRows{combined_row_bytes(rows)}).status(); !status.ok())
        return status;
    }
    params.emplace(LatencyDispatchParams{
        .send = {.call = params_of(routing), .placement = routing.placement->tables, .scales = {}, .row = row_of(rows)},
        .receive = {}});
    DispatchSendParams& send = params->send;
    send.call.counts_waits = call.wait_times_ns != nullptr;
    if (routing.homes.present()) send.placement.homes = routing.homes.tables();
    send.topk_idx = call.route.topk_idx.data;
    send.wide_ids = call.route.topk_idx.dtype == DType::kInt64;
    send.weights = static_cast<const float*>(call.route.topk_weights.data);
    send.num_tokens_view = static_cast<const std::int32_t*>(call.route.num_tokens_view.data);
    send.x = rows.x.data;
    send.x_stride = rows.x.stride_bytes;
    send.quantize = rows.quantize;
    send.hidden = rows.quantize == Quantization::kNone ? 0 : rows.out_x.row_bytes;
    send.scales = const_scales(rows.scales);
    DispatchReceiveRows& receive = params->receive;
    receive.placement = send.placement;
    receive.counters = counter_tables(call.route.options.counters);
    receive.x = rows.out_x.data;
    receive.x_stride = rows.out_x.stride_bytes;
    receive.scales = slab_scales(rows.out_scales, routing.slab_capacity);
    receive.row = send.row;
    receive.zero_padding = rows.zero_padding;
    receive.host = routing.host_tables;
    const BlockLimits limits = block_limits(
        rows.kernel, {Operation::kLatencyDispatch, Layout::kSlab, routing.num_tokens, rows.out_x.row_bytes});
    if (over_nodes()) {
      num_receive_blocks = share_blocks_over_nodes(*params, limits, far_->params().layout);
    } else if (call.split || in_halves()) {
      num_receive_blocks = share_half_blocks(*params, limits);
      send.call.small = call.split && !in_halves() && is_small_in_halves(*params, num_receive_blocks);
    } else {
      share_blocks(*params, limits);
    }
    if (call.split) routing.dispatch_receive = std::make_unique<DispatchReceiveParams>();
    return {};
  };
  const auto launch_call = [&](const Launch& launch) {
    LatencyRouting& routing = *made;
    DispatchSendParams& send = params->send;
    send.call.agreement = launch.agreement;
    send.call.record_number = launch.record_number;
    cudaError_t error = routing.homes.launch(launch.stream);
    if (call.split) {
      if (error == cudaSuccess) error = launch_send(*params, launch.stream);
      *routing.dispatch_receive = {params->receive, send.call, send.quantize};
      routing.dispatch_receive->call.num_blocks = num_receive_blocks;
      routing.wait_times_ns = call.wait_times_ns;
    } else if (error == cudaSuccess) {
      error = launch_timed(wait_times_of(context_.parts(), call.wait_times_ns), launch.stream, [&] {
        if (!over_nodes()) return launch_latency_dispatch(*params, num_receive_blocks, mask_, launch.stream);
        const cudaError_t sent = launch_send(*params, launch.stream);
        DispatchReceiveParams receive{params->receive, send.call, send.quantize};
        receive.call.num_blocks = num_receive_blocks;
        return sent == cudaSuccess ? launch_receive(receive, launch.stream) : sent;
      });
    }
    return error;
  };
  const auto launch_refusal = [&](const Launch& launch, const CallRecord& /*refused*/) {
    return this->launch_refusal(LatencyKind::kDispatch, launch);
  };
  CallOf steps{prepare, launch_call, launch_refusal};
  if (Status status = make_call({context_, call.record, call.stream}, steps); !status.ok()) return status;
  if (call.split) {
    in_flight_.push_back(made);
  } else {
    made->received.store(!captured, std::memory_order_release);
  }
  return std::shared_ptr<RoutingState>(std::move(made));
}

Result<std::shared_ptr<RoutingState>> LatencyMode::dispatch(const LatencyDispatchCall& call) {
  return on_gpu(context_, Operation::kLatencyDispatch, [&] { return make_dispatch(call); });
}

}  // namespace ferry::cuda
