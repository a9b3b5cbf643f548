#include <fmt/format.h>

#include <algorithm>

#include "ferry/group.hpp"
#include "node/arena.hpp"
#include "plan/route_tables.hpp"
#include "plan/to_size.hpp"
#include "plan/token_record.hpp"

namespace ferry {
namespace {

/// Any shape beyond this is a mistake; the bound keeps products inside 64 bits.
constexpr std::int64_t kMaxExtent = std::int64_t{1} << 31;

Status check(std::string_view name, std::int64_t value, std::int64_t lowest) {
  if (value >= lowest && value <= kMaxExtent) return {};
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("bytes_required: {} is {}, expected {} to {}", name, value, lowest, kMaxExtent));
}

}  // namespace

Result<std::size_t> bytes_required(const MemoryShape& shape) {
  const std::pair<std::string_view, std::int64_t> extents[] = {
      {"num_tokens", shape.num_tokens}, {"num_recv_rows", shape.num_recv_rows},
      {"row_bytes", shape.row_bytes},   {"scale_row_bytes", shape.scale_row_bytes},
      {"num_topk", shape.num_topk},     {"num_experts", shape.num_experts}};
  for (const auto& [name, value] : extents) {
    if (Status status = check(name, value, 0); !status.ok()) return status;
  }
  if (Status status = check("num_ranks", shape.num_ranks, 1); !status.ok()) return status;
  if (shape.num_topk > kMaxTopk) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("bytes_required: num_topk is {}, expected at most {}", shape.num_topk, kMaxTopk));
  }

  using node::round_up_to_page;
  const auto num_tokens = to_size(shape.num_tokens);
  const auto num_rows = to_size(shape.num_recv_rows);
  const auto row_bytes = to_size(shape.row_bytes);
  const auto num_topk = to_size(shape.num_topk);

  const std::size_t tables_bytes =
      plan::RouteTables::at(nullptr, {to_size(shape.num_ranks), to_size(shape.num_experts), num_tokens * num_topk})
          .size_bytes;
  const plan::TokenRecord record = plan::TokenRecord::of(
      {shape.scale_row_bytes, static_cast<int>(shape.num_topk), shape.weights, shape.weights, false});
  const std::size_t record_bytes = to_size(record.size_bytes());
  const std::size_t weights_per_row = shape.layout == Layout::kTokens ? num_topk : 1;
  const std::size_t weights_bytes = shape.weights ? num_rows * weights_per_row * sizeof(float) : 0;
  const std::size_t staged_rows_bytes = shape.symmetric ? 0 : std::max(num_tokens, num_rows) * row_bytes;
  const std::size_t staging_bytes = 2 * round_up_to_page(tables_bytes) +
                                    round_up_to_page(std::max(record_bytes * num_tokens, weights_bytes)) +
                                    round_up_to_page(staged_rows_bytes);
  const std::size_t buffers_bytes =
      shape.symmetric ? round_up_to_page(num_tokens * row_bytes) + 2 * round_up_to_page(num_rows * row_bytes) : 0;
  return node::kControlBytes + staging_bytes + buffers_bytes;
}

}  // namespace ferry
