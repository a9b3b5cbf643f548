#include <fmt/format.h>

#include "core/checks.hpp"
#include "core/tile_signals.hpp"

/// Checks of latency mode. It takes the arguments of a route of layout kSlab, a dispatch and a weighted combine, so
/// their checks are reused, with the call's name replaced in their messages.

namespace ferry {
namespace {

constexpr std::string_view kDispatch = "latency_dispatch";
constexpr std::string_view kCombine = "latency_combine";

/// Checks that the sums of ranks can travel in the combine's format.
Status check_sums_format(const CombineCall& call, CombineOrder order) {
  if (call.wire_format == WireFormat::kAsGiven) return {};
  if (order != CombineOrder::kRankSums) {
    return Status(ErrorCode::kUnsupported,
                  fmt::format("{}: wire_format is kFp8 and order is kExact, expected kRankSums: only the sums of ranks "
                              "travel as FP8; pass kRankSums, or kAsGiven",
                              kCombine));
  }
  if (call.x.dtype == DType::kBfloat16) return {};
  return Status(ErrorCode::kUnsupported,
                fmt::format("{}: wire_format is kFp8 and the dtype of input x is {}, expected bf16; pass x and the "
                            "output as bf16, or kAsGiven",
                            kCombine, to_string(call.x.dtype)));
}

/// A view of three dimensions must be [L, C, …], not just any with as many rows.
Status check_slab(std::string_view what, const ConstTensorView& view, std::int64_t num_local_experts,
                  std::int64_t slab_capacity) {
  if (view.num_dims != kMaxTensorDims) return {};
  if (view.extent(0) == num_local_experts && view.extent(1) == slab_capacity) return {};
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("{} is {}, expected [{}, {}, {}]: this rank's experts and slab_capacity, or two dimensions",
                            what, describe(view), num_local_experts, slab_capacity, view.extent(2)));
}

}  // namespace

Status as_error_of(std::string_view operation, const Status& status) {
  if (status.ok()) return status;
  const std::string_view message = status.message();
  for (const std::string_view other : {"route: ", "dispatch: ", "combine: "}) {
    if (!message.starts_with(other)) continue;
    return Status(status.code(), fmt::format("{}: {}", operation, message.substr(other.size())), status.peer());
  }
  return status;
}

Status check_latency_dispatch(const LatencyDispatchInput& in, const LatencyDispatchOutput& out,
                              const LatencyDispatchOptions& options, ExpertPlacements& placements, bool ids_on_host,
                              LatencyDispatchCall& call) {
  const RouteInput route{in.topk_idx, in.topk_weights};
  RouteOptions route_options;
  route_options.num_experts = options.num_experts;
  route_options.layout = Layout::kSlab;
  route_options.slab_capacity = options.slab_capacity;
  route_options.expert_to_rank = options.expert_to_rank;
  route_options.num_sms = options.kernel.num_sms;
  route_options.placement = options.placement;
  route_options.counters = options.counters;
  if (in.num_tokens_view.present()) {
    if (Status status = check_table("latency_dispatch: num_tokens_view", in.num_tokens_view, {1}, {DType::kInt32});
        !status.ok()) {
      return status;
    }
    call.route.num_tokens_view = in.num_tokens_view;
  }
  if (Status status = check_route(route, route_options, placements, ids_on_host, call.route); !status.ok()) {
    return as_error_of(kDispatch, status);
  }
  if (options.max_tokens < 1) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: max_tokens is {}, expected the most tokens of any rank, at least 1", kDispatch,
                              options.max_tokens));
  }
  if (call.route.num_tokens > options.max_tokens) {
    return Status(ErrorCode::kCapacity,
                  fmt::format("{}: topk_idx is {}: {} tokens, expected at most max_tokens, which is {}", kDispatch,
                              describe(in.topk_idx), call.route.num_tokens, options.max_tokens));
  }
  call.num_local_experts = call.route.placement->num_local_experts;

  RoutingState routing;  // the fields that the dispatch's checks read
  routing.num_tokens = call.route.num_tokens;
  routing.num_topk = call.route.num_topk;
  routing.layout = Layout::kSlab;
  routing.num_recv_rows = call.num_local_experts * options.slab_capacity;
  const DispatchInput dispatch_in{in.x, in.scales, {}};
  DispatchOutput dispatch_out;
  dispatch_out.x = out.x;
  dispatch_out.scales = out.scales;
  DispatchOptions dispatch_options;
  dispatch_options.quantize = options.quantize;
  dispatch_options.kernel = options.kernel;
  if (Status status =
          check_dispatch(routing, dispatch_in, dispatch_out, dispatch_options, call.dispatch, ScaleShapes::kSlabs);
      !status.ok()) {
    return as_error_of(kDispatch, status);
  }
  for (const auto& [what, view] :
       {std::pair<std::string_view, ConstTensorView>("latency_dispatch: output x", out.x),
        std::pair<std::string_view, ConstTensorView>("latency_dispatch: output scales", out.scales)}) {
    if (Status status = check_slab(what, view, call.num_local_experts, options.slab_capacity); !status.ok()) {
      return status;
    }
  }
  call.dispatch.zero_padding = options.zero_padding;
  call.dispatch.kernel = options.kernel;
  call.max_tokens = options.max_tokens;
  call.split = options.split;
  return {};
}

Status check_latency_combine(const RoutingState& routing, const LatencyCombineInput& in,
                             const LatencyCombineOutput& out, const LatencyCombineOptions& options,
                             LatencyCombineCall& call) {
  if (options.order != CombineOrder::kExact && options.order != CombineOrder::kRankSums) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: order is {}, expected kExact or kRankSums; pass an enumerator", kCombine,
                              static_cast<int>(options.order)));
  }
  CombineInput combine_in;
  combine_in.x = in.x;
  combine_in.topk_weights = in.topk_weights;
  CombineOutput combine_out;
  combine_out.x = out.x;
  CombineOptions combine_options;
  combine_options.weighted = true;
  combine_options.kernel = options.kernel;
  combine_options.wire_format = options.wire_format;
  if (Status status = check_combine(routing, combine_in, combine_out, combine_options, call.combine); !status.ok()) {
    return as_error_of(kCombine, status);
  }
  if (Status status = check_sums_format(call.combine, options.order); !status.ok()) return status;
  const auto num_local_experts = static_cast<std::int64_t>(routing.local_expert_ids.size());
  if (Status status = check_signals(in.signals, num_local_experts, routing.num_recv_rows, call.combine.out_x);
      !status.ok()) {
    return status;
  }
  call.signals = in.signals;
  call.own_weights = in.topk_weights.present();
  call.combine.rank_sums = options.order == CombineOrder::kRankSums;
  call.combine.kernel = options.kernel;
  call.split = options.split;
  return {};
}

Status check_wait_times(std::string_view operation, const TensorView& view, int num_ranks, std::int64_t*& times_ns) {
  times_ns = nullptr;
  if (!view.present()) return {};
  Status status = check_table(fmt::format("{}: wait_times_ns", operation), view, {num_ranks}, {DType::kInt64});
  if (status.ok()) times_ns = static_cast<std::int64_t*>(view.data);
  return status;
}

Status check_masked_rank(int rank, const Topology& topology) {
  if (rank >= 0 && rank < topology.num_ranks && rank != topology.rank) return {};
  return Status(
      ErrorCode::kInvalidArgument,
      fmt::format("latency_update_mask: rank is {}, expected one of the {} ranks other than this one, rank {}", rank,
                  topology.num_ranks, topology.rank));
}

Status check_mask_view(const TensorView& out, int num_ranks) {
  constexpr std::string_view kWhat = "latency_query_mask: out";
  if (!out.present()) {
    return Status(ErrorCode::kInvalidArgument, fmt::format("{} is absent, expected [{}] i32", kWhat, num_ranks));
  }
  return check_table(kWhat, out, {num_ranks}, {DType::kInt32});
}

}  // namespace ferry
