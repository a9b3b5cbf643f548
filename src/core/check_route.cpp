#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "core/checks.hpp"

namespace ferry {
namespace {

/// Rows and tokens are counted in i32 tables.
constexpr std::int64_t kMaxRows = std::numeric_limits<std::int32_t>::max();

Status invalid_route(std::string message) {
  return Status(ErrorCode::kInvalidArgument, "route: " + std::move(message));
}

Status check_options(const RouteOptions& options) {
  if (options.num_experts < 1 || options.num_experts > kMaxPlacedExperts) {
    return invalid_route(fmt::format("num_experts is {}, expected 1 to {}", options.num_experts, kMaxPlacedExperts));
  }
  if (options.layout != Layout::kTokens && options.layout != Layout::kExperts && options.layout != Layout::kSlab) {
    return invalid_route(
        fmt::format("layout is {}, expected kTokens, kExperts or kSlab", static_cast<int>(options.layout)));
  }
  if (options.expert_alignment < 1 || options.expert_alignment > kMaxRows) {
    return invalid_route(fmt::format("expert_alignment is {}, expected 1 to {}", options.expert_alignment, kMaxRows));
  }
  if (options.layout != Layout::kExperts && options.expert_alignment != 1) {
    return invalid_route(fmt::format("expert_alignment is {}, expected 1: only layout kExperts has groups to align",
                                     options.expert_alignment));
  }
  if (options.layout == Layout::kSlab) {
    const std::int64_t num_physical = std::max(options.num_experts, options.placement.num_physical_experts());
    if (options.slab_capacity < 1 || options.slab_capacity > kMaxRows / num_physical) {
      return invalid_route(fmt::format("slab_capacity is {}, expected 1 to {} rows per local expert",
                                       options.slab_capacity, kMaxRows / num_physical));
    }
    if (options.max_recv_rows != 0) {
      return invalid_route(
          fmt::format("max_recv_rows is {}, expected 0: slab_capacity already bounds a slab", options.max_recv_rows));
    }
  } else if (options.slab_capacity != 0) {
    return invalid_route(
        fmt::format("slab_capacity is {}, expected 0: only layout kSlab has one", options.slab_capacity));
  }
  if (options.max_recv_rows < 0 || options.max_recv_rows > kMaxRows) {
    return invalid_route(
        fmt::format("max_recv_rows is {}, expected 0 (rows known after route) to {}", options.max_recv_rows, kMaxRows));
  }
  if (options.max_tokens < 0 || options.max_tokens > kMaxRows) {
    return invalid_route(fmt::format("max_tokens is {}, expected 0 (no bound) to {}", options.max_tokens, kMaxRows));
  }
  if (options.max_tokens > 0 && options.max_recv_rows == 0 && options.layout != Layout::kSlab) {
    return invalid_route(
        fmt::format("max_tokens is {} and max_recv_rows is 0, expected a bound on rows too; give max_recv_rows, or "
                    "leave max_tokens at 0",
                    options.max_tokens));
  }
  return check_kernel("route", {.num_sms = options.num_sms});
}

/// Checks the ids of the first `num_tokens` tokens.
template <typename Id>
Status check_ids(const ConstTensorView& topk_idx, std::int64_t num_tokens, std::int64_t num_experts) {
  const auto* ids = static_cast<const Id*>(topk_idx.data);
  const std::int64_t num_ids = num_tokens * topk_idx.extent(1);
  for (std::int64_t i = 0; i < num_ids; ++i) {
    if (ids[i] >= -1 && ids[i] < num_experts) continue;
    const std::int64_t num_topk = topk_idx.extent(1);
    return invalid_route(fmt::format("topk_idx[{}, {}] is {}, expected -1 (no expert) or an expert from 0 to {}",
                                     i / num_topk, i % num_topk, ids[i], num_experts - 1));
  }
  return {};
}

Status check_counters(const RouteOptions& options, const ExpertPlacement& placement) {
  const auto num_physical = static_cast<std::int64_t>(placement.expert_to_rank.size());
  const LoadCounters& counters = options.counters;
  const auto check = [](std::string_view what, const TensorView& view, std::int64_t size) {
    return view.present() ? check_table(what, view, {size}, {DType::kInt32, DType::kInt64}) : Status();
  };
  Status status = check("route: counters.logical", counters.logical, options.num_experts);
  if (status.ok()) status = check("route: counters.physical", counters.physical, num_physical);
  if (status.ok()) status = check("route: counters.received", counters.received, placement.num_local_experts);
  if (status.ok()) status = check("route: counters.homeless", counters.homeless, 1);
  return status;
}

}  // namespace

Status check_route(const RouteInput& in, const RouteOptions& options, ExpertPlacements& placements, bool ids_on_host,
                   RouteCall& call) {
  if (Status status = check_options(options); !status.ok()) return status;
  Result<std::shared_ptr<const ExpertPlacement>> placement =
      placements.find("route", {options.num_experts, options.expert_to_rank, options.placement}, ids_on_host);
  if (!placement.ok()) return placement.status();

  if (in.topk_idx.num_dims != 2) {
    return invalid_route(fmt::format("topk_idx is {}, expected [T, K]", describe(in.topk_idx)));
  }
  const std::int64_t num_tokens = in.topk_idx.extent(0);
  const std::int64_t num_topk = in.topk_idx.extent(1);
  if (num_topk < 1 || num_topk > kMaxTopk) {
    return invalid_route(
        fmt::format("topk_idx is {}: K is {}, expected 1 to {}", describe(in.topk_idx), num_topk, kMaxTopk));
  }
  if (num_tokens < 0 || num_tokens > kMaxRows / num_topk) {
    return invalid_route(fmt::format("topk_idx is {}: T is {}, expected 0 to {}", describe(in.topk_idx), num_tokens,
                                     kMaxRows / num_topk));
  }
  if (options.max_tokens > 0 && num_tokens > options.max_tokens) {
    return Status(ErrorCode::kCapacity,
                  fmt::format("route: topk_idx is {}: {} tokens, expected at most max_tokens, which is {}",
                              describe(in.topk_idx), num_tokens, options.max_tokens));
  }
  if (Status status =
          check_table("route: topk_idx", in.topk_idx, {num_tokens, num_topk}, {DType::kInt32, DType::kInt64});
      !status.ok()) {
    return status;
  }
  if (in.topk_weights.present()) {
    if (Status status = check_table("route: topk_weights", in.topk_weights, {num_tokens, num_topk}, {DType::kFloat32});
        !status.ok()) {
      return status;
    }
  }
  call.topk_idx = in.topk_idx;
  call.topk_weights = in.topk_weights;
  call.num_tokens = num_tokens;
  call.num_topk = static_cast<int>(num_topk);
  call.options.num_experts = static_cast<std::int64_t>((*placement)->expert_to_rank.size());
  call.options.layout = options.layout;
  call.options.expert_alignment = options.expert_alignment;
  call.options.slab_capacity = options.slab_capacity;
  call.options.max_recv_rows = options.max_recv_rows;
  call.options.max_tokens = options.max_tokens;
  call.options.num_sms = options.num_sms;
  call.options.placement.physical_to_logical_view = options.placement.physical_to_logical_view;
  if (Status status = check_counters(options, **placement); !status.ok()) return status;
  call.options.counters = options.counters;
  if (ids_on_host) {
    const std::int64_t num_counted = num_counted_tokens(call);
    Status status = in.topk_idx.dtype == DType::kInt32
                        ? check_ids<std::int32_t>(in.topk_idx, num_counted, options.num_experts)
                        : check_ids<std::int64_t>(in.topk_idx, num_counted, options.num_experts);
    if (!status.ok()) return status;
  }
  call.placement = *std::move(placement);
  return {};
}

}  // namespace ferry
