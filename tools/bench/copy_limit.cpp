#include "bench/copy_limit.hpp"

#include <cstring>

namespace ferry::tools {

void copy_as_dispatch(const BenchPlan& plan, const BenchBuffers& buffers, const std::vector<int>& rows_per_token) {
  const auto payload_bytes = static_cast<std::size_t>(plan.payload_bytes());
  const auto side_bytes = static_cast<std::size_t>(plan.scale_bytes() + plan.metadata_bytes());
  const std::byte* from = buffers.x.data();
  const std::byte* from_side = buffers.side_in.data();
  std::byte* to = buffers.received;
  auto* to_side = const_cast<std::byte*>(buffers.side_out.data());
  for (int num_rows : rows_per_token) {
    for (int row = 0; row < num_rows; ++row) {
      std::memcpy(to, from, payload_bytes);
      if (side_bytes > 0) std::memcpy(to_side, from_side, side_bytes);  // without side bytes there is no such memory
      to += payload_bytes;
      to_side += side_bytes;
    }
    from += payload_bytes;
    from_side += side_bytes;
  }
}

void copy_as_combine(const BenchPlan& plan, const BenchBuffers& buffers, std::int64_t num_sent_rows) {
  const std::int64_t row_bytes = plan.combine_sent_row_bytes();
  const std::int64_t num_rows = (num_sent_rows + plan.num_tokens) / 2;
  for (std::int64_t row = 0; row < num_rows; ++row) {
    std::memcpy(buffers.y.row(num_rows + row, row_bytes), buffers.y.row(row, row_bytes),
                static_cast<std::size_t>(row_bytes));
  }
}

}  // namespace ferry::tools
