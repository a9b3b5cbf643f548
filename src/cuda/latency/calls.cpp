#include "cuda/latency/calls.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "core/checks.hpp"
#include "cuda/call/group_call.hpp"
#include "cuda/call/tuning.hpp"
#include "cuda/call/wait_times.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/latency/far_message.hpp"
#include "cuda/latency/kernels.hpp"
#include "cuda/latency/memory.hpp"
#include "cuda/memory/memory_checks.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

/// One block that reports and one that moves rows.
constexpr int kLeastBlocks = 2;

TileWords tiles_of(const TileSignals& signals) {
  if (!signals.present()) return {};
  constexpr std::int64_t kMostRows = std::numeric_limits<std::int32_t>::max();
  return {static_cast<const std::int32_t*>(signals.words.data),
          static_cast<std::int32_t>(std::min(signals.tile_rows, kMostRows)),
          static_cast<std::int32_t>(signals.words.extent(1)), signals.threshold};
}

RowKind kind_of(const CombineCall& rows) {
  if (rows.wire_format == WireFormat::kFp8) return RowKind::kFp8Sums;
  return rows.x.dtype == DType::kFloat32 ? RowKind::kFloat32 : RowKind::kBfloat16;
}

}  // namespace

LatencyMode::LatencyMode(Context& context, Placements& placements, FarLink* far)
    : context_(context),
      placements_(placements),
      far_(far),
      layout_(latency_layout(context.parts().sync->topology(), context.parts().latency_bytes)) {
  const Parts& parts = context.parts();
  if (parts.masks == nullptr) return;
  std::size_t size_bytes = 0;
  mask_ = MaskParams::at(parts.masks.get(), to_size(parts.ranks.num_ranks), size_bytes);
  mask_.timeout_ns = parts.mask_timeout_ns;
}

Status LatencyMode::check_room(std::string_view operation, const SetNeed& need) const {
  const std::int64_t num_ranks = ranks().num_ranks;
  if (has_memory() && layout_.holds(need, num_ranks)) return {};
  return Status(ErrorCode::kCapacity,
                fmt::format("{}: the group has {} bytes to receive in, expected at least {} for a call of this shape; "
                            "create it with the GroupOptions::latency_bytes that latency_bytes_required returns",
                            operation, context_.parts().latency_bytes, LatencyLayout::bytes_for(need, num_ranks)));
}

cudaError_t LatencyMode::launch_refusal(LatencyKind kind, const Launch& launch) const {
  LatencyRefusalParams params;
  params.call.ranks = ranks();
  params.call.layout = layout_;
  params.call.record_number = launch.record_number;
  params.kind = kind;
  if (over_nodes()) {
    far_->expect_posts();
    const cudaError_t error = launch_far_refusal({params.call, far_->params(), kind}, launch.stream);
    if (error != cudaSuccess) return error;
  }
  return launch_latency_refusal(params, mask_, launch.stream);
}

BlockLimits LatencyMode::block_limits(const KernelOptions& options, const TunedCall& call) const {
  const Parts& parts = context_.parts();
  const DeviceLimits limits{parts.num_sms, parts.has_bulk, ranks().num_ranks, parts.num_waiting_sms};
  const int num_sms = tuned(options, parts.tuning, call).num_sms;
  const int most = std::clamp(most_blocks(num_sms, limits), kLeastBlocks, kMaxCallBlocks);
  // Gates wait in place of the kernels of groups that mask lost ranks (mask.hpp).
  if (masks()) return {most, most};
  // A file says how fast calls are, not which kernels of other libraries must run beside them.
  const int most_waiting = std::clamp(most_waiting_blocks(options.num_sms, limits), kLeastBlocks, most);
  // With others in flight the grant for a call may come only when a peer begins the same call.
  return {in_flight_.empty() ? most : most_waiting, most_waiting};
}

LatencyParams LatencyMode::params_of(const LatencyRouting& routing) const {
  LatencyParams params{.ranks = ranks(), .layout = layout_, .tables = routing.latency};
  params.num_tokens = routing.num_tokens;
  params.max_tokens = routing.max_tokens;
  params.num_topk = routing.num_topk;
  params.num_experts = static_cast<int>(routing.num_experts);
  params.num_local_experts = static_cast<int>(routing.local_expert_ids.size());
  params.slab_capacity = routing.slab_capacity;
  params.overlaps = context_.parts().has_bulk;
  return params;
}

Status LatencyMode::make_combine(const LatencyCombineCall& call) {
  constexpr std::string_view kName = "latency_combine";
  const CombineCall& rows = call.combine;
  // As in a dispatch: none was made.
  if (!has_memory()) return rows.record.code == ErrorCode::kOk ? check_room(kName, {}) : status_of(rows.record);
  const Parts& parts = context_.parts();
  std::optional<LatencyCombineParams> params;
  Returns returns;
  int num_receive_blocks = 0;
  // Core hands out Routings as const; this one also keeps the parameters of its receive half.
  const auto routing_of = [](const CombineCall& combine) -> LatencyRouting& {
    return static_cast<LatencyRouting&>(const_cast<RoutingState&>(*combine.routing));
  };
  const auto prepare = [&](const CallStream& /*stream*/) -> Status {
    LatencyRouting& routing = routing_of(rows);
    const CombineOrder order = rows.rank_sums ? CombineOrder::kRankSums : CombineOrder::kExact;
    const int num_rows = num_returned_rows(order, routing.num_topk, ranks().num_ranks);
    const CombineRows row_format{rows.x.row_bytes, kind_of(rows), order};
    Status status =
        check_room(kName, SetNeed::of_combine(routing.max_tokens, routing.num_topk, num_rows, row_format.wire_bytes()));
    if (status.ok()) status = as_error_of(kName, check_combine_memory(rows, *parts.arena));
    if (status.ok()) status = check_wait_times_memory(kName, call.wait_times_ns, *parts.arena);
    if (status.ok()) status = check_signals_memory(call.signals, *parts.arena);
    if (!status.ok()) return status;
    if (over_nodes()) {
      Result<Returns> taken = returns_of(kName, routing, row_format);
      if (!taken.ok()) return taken.status();
      returns = std::move(*taken);
      far_->use_returns();
    }

    params.emplace(LatencyCombineParams{.send = {.call = params_of(routing), .rows = {}, .tiles = {}}, .receive = {}});
    CombineSendParams& send = params->send;
    send.call.counts_waits = call.wait_times_ns != nullptr;
    send.rows = row_format;
    // Gates of groups that mask ranks wait for flags of rows.
    if (over_nodes()) {
      send.rows.word_step_vectors =
          word_step_vectors_over_nodes(send.rows, routing.max_tokens, layout_, far_->params().layout);
    } else if (rows.rank_sums && !in_halves()) {
      send.rows.word_step_vectors =
          send.rows.fp8() ? fp8_step_vectors(layout_, rows.x.row_bytes, routing.max_tokens, ranks().num_ranks)
                          : layout_.word_step_vectors(rows.x.row_bytes, routing.max_tokens, ranks().num_ranks);
    }
    send.x = rows.x.data;
    send.x_stride = rows.x.stride_bytes;
    const auto* weights = static_cast<const float*>(rows.topk_weights.data);
    send.own_weights = call.own_weights;
    send.weights = weights;
    send.tiles = tiles_of(call.signals);
    const TunedCall tuned_call{Operation::kLatencyCombine, Layout::kSlab, routing.num_tokens, rows.x.row_bytes};
    const BlockLimits limits = block_limits(rows.kernel, tuned_call);
    // Blocks that send rows wait for their weights or tiles, and those that send words receive them, too.
    const bool sends_wait = send.rows.words() || (rows.rank_sums && call.own_weights) || send.tiles.present();
    // Helpers cost more than they add where each block that may wait has at most one sum to send. Between two H200 a
    // pair in a graph took 23.6 us with helpers and 21.9 with 100 blocks for 32 tokens, 25.0 and 26.9 for 64.
    const std::int64_t most_sums = send.call.max_tokens * send.call.ranks.num_ranks;
    const bool all_wait = sends_wait || (rows.rank_sums && !call.split && most_sums < limits.most_waiting);
    send.call.num_blocks = combine_blocks(send.call, send.rows, all_wait ? limits.most_waiting : limits.most);
    num_receive_blocks = std::min(send.call.num_blocks, limits.most_waiting);
    if (call.split && send.tiles.present()) {
      // The program bounds the half that runs beside a kernel of its own.
      const int most = block_limits({}, tuned_call).most_waiting;
      num_receive_blocks = std::min(combine_blocks(send.call, send.rows, most), most);
    }

    CombineReceiveRows& receive = params->receive;
    receive.rows = send.rows;
    receive.own_weights = call.own_weights;
    receive.first_receiver = call.split || over_nodes() ? 1 : 1 + send.call.num_blocks - num_receive_blocks;
    if (over_nodes()) receive.far = far_->params();
    receive.out = rows.out_x.data;
    receive.out_stride = rows.out_x.stride_bytes;
    receive.weights = weights;
    if (call.split && routing.combine_receive == nullptr) {
      routing.combine_receive = std::make_unique<CombineReceiveParams>();
    }
    return {};
  };
  const auto launch_call = [&](const Launch& launch) {
    LatencyRouting& routing = routing_of(rows);
    CombineSendParams& send = params->send;
    send.call.agreement = launch.agreement;
    send.call.record_number = launch.record_number;
    cudaError_t error = cudaSuccess;
    if (const bool is_gated = over_nodes() ? send.rows.words() : is_small(*params); is_gated && send.tiles.present()) {
      error = launch_tiles_gate({send.call, std::exchange(send.tiles, {})}, launch.stream);
      if (error != cudaSuccess) return error;
    }
    if (call.split) {
      error = launch_send(send, returns, launch.stream);
      *routing.combine_receive = {params->receive, send.call};
      routing.combine_receive->call.num_blocks = num_receive_blocks;
      routing.wait_times_ns = call.wait_times_ns;
    } else {
      error = launch_timed(wait_times_of(parts, call.wait_times_ns), launch.stream, [&] {
        if (!over_nodes()) return launch_latency_combine(*params, mask_, launch.stream);
        const cudaError_t sent = launch_send(send, returns, launch.stream);
        CombineReceiveParams receive{params->receive, send.call};
        receive.call.num_blocks = num_receive_blocks;
        return sent == cudaSuccess ? launch_receive(receive, launch.stream) : sent;
      });
    }
    return error;
  };
  const auto launch_refusal = [&](const Launch& launch, const CallRecord& /*refused*/) {
    return this->launch_refusal(LatencyKind::kCombine, launch);
  };
  CallOf steps{prepare, launch_call, launch_refusal};
  Status ended = make_call({context_, rows.record, rows.stream}, steps);
  if (ended.ok() && call.split) in_flight_.push_back(rows.routing);
  return ended;
}

Result<Returns> LatencyMode::returns_of(std::string_view operation, const LatencyRouting& routing,
                                        const CombineRows& rows) {
  const std::int64_t num_rows =
      most_returned_rows({far_->params().layout.num_far(), routing.max_tokens, routing.num_topk,
                          static_cast<std::int64_t>(routing.local_expert_ids.size()), routing.num_recv_rows});
  const bool may_be_words =
      !rows.fp8() && far_->params().layout.return_words_bytes > 0 && rows.row_bytes <= kMostFarWordRow;
  const std::int64_t stride = std::max(rows.wire_stride(), may_be_words ? rows.far_words_bytes() : 0);
  Result<PinnedBlock> block = far_->take_returns(operation, to_size(num_rows * stride));
  if (!block.ok()) return block.status();
  return Returns{std::move(*block), num_rows, stride};
}

cudaError_t LatencyMode::launch_send(const CombineSendParams& params, const Returns& returns, cudaStream_t stream) {
  if (over_nodes()) {
    far_->expect_posts();
    const PinnedBlock& block = returns.block;
    const auto of_network = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(block.data.get()));
    return launch_nodes_combine_send(
        {params, far_->params(), block.kernel_view, returns.num_rows, of_network, returns.stride}, stream);
  }
  return launch_combine_send(params, mask_, stream);
}

cudaError_t LatencyMode::launch_receive(const CombineReceiveParams& params, cudaStream_t stream) const {
  if (over_nodes()) return launch_nodes_combine_receive(params, stream);
  return launch_combine_receive(params, mask_, stream);
}

Status LatencyMode::combine(const LatencyCombineCall& call) {
  return on_gpu(context_, Operation::kLatencyCombine, [&] { return make_combine(call); });
}

Status LatencyMode::make_receive(const LatencyReceiveCall& call, bool& made) {
  constexpr std::string_view kName = "latency_receive";
  auto& routing = static_cast<LatencyRouting&>(const_cast<RoutingState&>(*call.routing));
  const bool of_combine = routing.latency_phase == LatencyPhase::kCombineSent;
  const Result<bool> captured = context_.check_stream(kName, call.stream);
  if (!captured.ok()) return captured.status();
  bool reports = false;
  if (!of_combine) {
    // Replays come after the host has read the counts and reused their memory.
    if (*captured) routing.dispatch_receive->host = {};
    reports = routing.dispatch_receive->host.result != nullptr;
  }
  const auto launch = [this, &routing, of_combine](cudaStream_t stream) {
    return launch_timed(wait_times_of(context_.parts(), routing.wait_times_ns), stream, [&] {
      return of_combine ? launch_receive(*routing.combine_receive, stream)
                        : launch_receive(*routing.dispatch_receive, stream);
    });
  };
  Status status = context_.launch_local(kName, call.stream, launch, *captured);
  // The peers have sent, and wait until this rank grants the set again.
  if (!status.ok()) return *captured ? status : context_.fail(status);
  if (!of_combine) routing.received.store(reports, std::memory_order_release);
  std::erase(in_flight_, call.routing);
  made = true;
  return {};
}

Status LatencyMode::receive(const LatencyReceiveCall& call, bool& made) {
  return on_gpu(context_, Operation::kLatencyDispatch, [&] { return make_receive(call, made); });
}

Result<LatencyParams> LatencyMode::mask_call(std::string_view operation) const {
  if (!has_memory()) return check_room(operation, {});
  LatencyParams params;
  params.ranks = ranks();
  params.layout = layout_;
  return params;
}

Status LatencyMode::update_mask(int rank, bool masked, Stream stream) {
  constexpr std::string_view kName = "latency_update_mask";
  const DeviceGuard guard(context_.parts().device);
  if (!guard.status().ok()) return guard.status();
  const Result<LatencyParams> call = mask_call(kName);
  if (!call.ok()) return call.status();
  const bool every = rank == kEveryRank;
  const MaskUpdateParams update{*call, mask_, every ? 0 : rank, every ? call->ranks.num_ranks : rank + 1, masked};
  return context_.launch_local(kName, stream, [&update](cudaStream_t to) { return launch_mask_update(update, to); });
}

Status LatencyMode::query_mask(std::int32_t* out, Stream stream) {
  constexpr std::string_view kName = "latency_query_mask";
  const Parts& parts = context_.parts();
  const DeviceGuard guard(parts.device);
  if (!guard.status().ok()) return guard.status();
  if (const Result<LatencyParams> call = mask_call(kName); !call.ok()) return call.status();
  const ConstTensorView view(out, DType::kInt32, {ranks().num_ranks});
  if (Status status = check_mask_memory(view, *parts.arena); !status.ok()) return status;
  const MaskQueryParams query{mask_, ranks().num_ranks, out};
  return context_.launch_local(kName, stream, [&query](cudaStream_t to) { return launch_mask_query(query, to); });
}

}  // namespace ferry::cuda
