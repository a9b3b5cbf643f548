#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string_view>
#include <utility>

#include "core/backend.hpp"

namespace ferry {
namespace {

/// Largest plausible extent; the bound keeps products inside 64 bits.
constexpr std::int64_t kMaxExtent = std::int64_t{1} << 31;
constexpr std::int64_t kMaxRoutings = std::int64_t{1} << 16;

Status invalid_size(std::string_view call, std::string_view name, std::int64_t value, const std::string& expected) {
  return Status(ErrorCode::kInvalidArgument, fmt::format("{}: {} is {}, expected {}", call, name, value, expected));
}

struct Extent {
  std::string_view name;
  std::int64_t value = 0;
  std::int64_t lowest = 0;
  std::int64_t highest = kMaxExtent;
};

Status check_extents(std::string_view call, std::span<const Extent> extents) {
  for (const Extent& extent : extents) {
    if (extent.value < extent.lowest || extent.value > extent.highest) {
      return invalid_size(call, extent.name, extent.value, fmt::format("{} to {}", extent.lowest, extent.highest));
    }
  }
  return {};
}

Status check_shape(const MemoryShape& shape) {
  // Numbers that are not checked yet are clamped: their product must not overflow.
  const auto bounded = [](std::int64_t value) { return std::clamp<std::int64_t>(value, 0, kMaxExtent); };
  const std::int64_t most_entries =
      (bounded(shape.num_node_tokens) + bounded(shape.num_forwarded_tokens)) * std::clamp(shape.num_topk, 0, kMaxTopk);
  const Extent extents[] = {{"num_ranks", shape.num_ranks, 1},
                            {"ranks_per_node", shape.ranks_per_node},
                            {"num_experts", shape.num_experts},
                            {"num_tokens", shape.num_tokens, 0, shape.max_tokens > 0 ? shape.max_tokens : kMaxExtent},
                            {"num_topk", shape.num_topk, 0, kMaxTopk},
                            {"num_recv_rows", shape.num_recv_rows},
                            {"num_used_rows", shape.num_used_rows, -1, shape.num_recv_rows},
                            {"row_bytes", shape.row_bytes},
                            {"scale_row_bytes", shape.scale_row_bytes},
                            {"quantized_row_bytes", shape.quantized_row_bytes},
                            {"combine_fp8_hidden", shape.combine_fp8_hidden},
                            {"num_node_tokens", shape.num_node_tokens, 0, shape.num_tokens},
                            {"num_forwarded_tokens", shape.num_forwarded_tokens},
                            {"num_node_entries", shape.num_node_entries, 0, most_entries},
                            {"max_tokens", shape.max_tokens},
                            {"num_local_experts", shape.num_local_experts, -1, shape.num_experts},
                            {"num_logical_experts", shape.num_logical_experts, 0, kMaxPlacedExperts},
                            {"num_routings", shape.num_routings, 1, kMaxRoutings}};
  if (Status status = check_extents("bytes_required", extents); !status.ok()) return status;
  if (shape.placement_on_device && shape.num_logical_experts == 0) {
    return invalid_size("bytes_required", "num_logical_experts", 0,
                        "E of the Placement, as placement_on_device is true");
  }
  if (shape.ranks_per_node != 0 && shape.num_ranks % shape.ranks_per_node != 0) {
    return invalid_size("bytes_required", "ranks_per_node", shape.ranks_per_node,
                        fmt::format("0 (all) or a divisor of the {} ranks", shape.num_ranks));
  }
  return {};
}

Result<const BackendFactory*> find_factory(std::string_view call, std::string_view name) {
  std::string names;
  for (const BackendFactory& factory : backend_factories()) {
    if (factory.name == name) return &factory;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", factory.name);
  }
  return Status(ErrorCode::kUnsupported,
                fmt::format("{}: backend is \"{}\", expected one of this build's: {}", call, name, names));
}

}  // namespace

Result<std::size_t> bytes_required(const MemoryShape& shape) {
  if (Status status = check_shape(shape); !status.ok()) return status;
  const Topology topology{0, shape.num_ranks, shape.ranks_per_node == 0 ? shape.num_ranks : shape.ranks_per_node};
  const Result<const BackendFactory*> factory = find_factory("bytes_required", shape.backend);
  if (!factory.ok()) return factory.status();
  return (*factory)->bytes_required(shape, topology);
}

Result<std::size_t> latency_bytes_required(const LatencyShape& shape) {
  constexpr std::string_view kCall = "latency_bytes_required";
  const Extent extents[] = {{"num_ranks", shape.num_ranks, 1},
                            {"max_tokens", shape.max_tokens},
                            {"num_topk", shape.num_topk, 0, kMaxTopk},
                            {"dispatch_row_bytes", shape.dispatch_row_bytes},
                            {"combine_row_bytes", shape.combine_row_bytes}};
  if (Status status = check_extents(kCall, extents); !status.ok()) return status;
  // Far above any machine's memory, and far below the overflow of a backend's arithmetic.
  constexpr double kMostBytes = 1e15;
  const auto num_rows = static_cast<double>(shape.num_ranks + shape.num_topk) * static_cast<double>(shape.max_tokens);
  const double num_bytes = num_rows * static_cast<double>(shape.dispatch_row_bytes + shape.combine_row_bytes);
  if (num_bytes > kMostBytes) {
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: {} ranks, {} tokens and rows of {} and {} bytes are some {:.0e} bytes, expected less "
                    "than {:.0e}; give the sizes of one batch of decoding",
                    kCall, shape.num_ranks, shape.max_tokens, shape.dispatch_row_bytes, shape.combine_row_bytes,
                    num_bytes, kMostBytes));
  }
  const Result<const BackendFactory*> factory = find_factory(kCall, shape.backend);
  if (!factory.ok()) return factory.status();
  return (*factory)->latency_bytes_required(shape);
}

}  // namespace ferry
