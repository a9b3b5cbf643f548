#include <fmt/format.h>

#include <string_view>
#include <utility>

#include "core/backend.hpp"

namespace ferry {
namespace {

/// Any shape beyond this is a mistake; the bound keeps products inside 64 bits.
constexpr std::int64_t kMaxExtent = std::int64_t{1} << 31;
constexpr std::int64_t kMaxRoutings = std::int64_t{1} << 16;

Status invalid(std::string_view name, std::int64_t value, const std::string& expected) {
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("bytes_required: {} is {}, expected {}", name, value, expected));
}

struct Extent {
  std::string_view name;
  std::int64_t value = 0;
  std::int64_t lowest = 0;
  std::int64_t highest = kMaxExtent;
};

Status check_extents(const MemoryShape& shape) {
  const Extent extents[] = {{"num_ranks", shape.num_ranks, 1},
                            {"ranks_per_node", shape.ranks_per_node},
                            {"num_experts", shape.num_experts},
                            {"num_tokens", shape.num_tokens},
                            {"num_topk", shape.num_topk, 0, kMaxTopk},
                            {"num_recv_rows", shape.num_recv_rows},
                            {"num_used_rows", shape.num_used_rows, -1, shape.num_recv_rows},
                            {"row_bytes", shape.row_bytes},
                            {"scale_row_bytes", shape.scale_row_bytes},
                            {"quantized_row_bytes", shape.quantized_row_bytes},
                            {"num_node_tokens", shape.num_node_tokens, 0, shape.num_tokens},
                            {"num_forwarded_tokens", shape.num_forwarded_tokens},
                            {"num_node_entries", shape.num_node_entries, 0,
                             (shape.num_node_tokens + shape.num_forwarded_tokens) * shape.num_topk},
                            {"num_local_experts", shape.num_local_experts, -1, shape.num_experts},
                            {"num_routings", shape.num_routings, 1, kMaxRoutings}};
  for (const Extent& extent : extents) {
    if (extent.value < extent.lowest || extent.value > extent.highest) {
      return invalid(extent.name, extent.value, fmt::format("{} to {}", extent.lowest, extent.highest));
    }
  }
  if (shape.ranks_per_node != 0 && shape.num_ranks % shape.ranks_per_node != 0) {
    return invalid("ranks_per_node", shape.ranks_per_node,
                   fmt::format("0 (all) or a divisor of the {} ranks", shape.num_ranks));
  }
  return {};
}

}  // namespace

Result<std::size_t> bytes_required(const MemoryShape& shape) {
  if (Status status = check_extents(shape); !status.ok()) return status;
  const Topology topology{0, shape.num_ranks, shape.ranks_per_node == 0 ? shape.num_ranks : shape.ranks_per_node};
  std::string names;
  for (const BackendFactory& factory : backend_factories()) {
    if (factory.name == shape.backend) return factory.bytes_required(shape, topology);
    names += fmt::format("{}{}", names.empty() ? "" : ", ", factory.name);
  }
  return Status(
      ErrorCode::kUnsupported,
      fmt::format("bytes_required: backend is \"{}\", expected one of this build's: {}", shape.backend, names));
}

}  // namespace ferry
