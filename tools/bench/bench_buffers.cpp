#include "bench/bench_buffers.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/bfloat16.hpp"
#include "common/hash.hpp"

namespace ferry::tools {

namespace {

/// Windows that rows are spread over: one in this many pairs of rows is equal.
constexpr std::size_t kNumWindows = 1 << 16;
/// Value of untouched memory, which differs from the pattern, so that a row that was never written is detected.
constexpr int kStale = 0x5A;
/// Bytes of rows copied at once between a GPU and the checks on the host.
constexpr std::int64_t kPieceBytes = std::int64_t{16} << 20;

}  // namespace

RowPattern::RowPattern(std::uint64_t seed, std::int64_t max_row_bytes)
    : seed_(seed), tile_(kNumWindows + static_cast<std::size_t>(max_row_bytes) / sizeof(std::uint16_t) + 1) {
  for (std::size_t i = 0; i < tile_.size(); ++i) {
    tile_[i] = bfloat16_from_float(signed_unit_float(static_cast<std::uint32_t>(splitmix64(seed + i))));
  }
}

const std::byte* RowPattern::row(int source_rank, std::int64_t source_token) const {
  const std::uint64_t key = derive_seed(derive_seed(seed_, static_cast<std::uint64_t>(source_rank)),
                                        static_cast<std::uint64_t>(source_token));
  return reinterpret_cast<const std::byte*>(tile_.data() + key % kNumWindows);
}

Status BenchBlock::allocate(const RankDevice& device, Group& group, BenchMemory memory, std::int64_t size_bytes) {
  const auto num_bytes = static_cast<std::size_t>(std::max<std::int64_t>(size_bytes, 1));
  if (memory == BenchMemory::kSymmetric) {
    auto buffer = group.allocate(num_bytes);
    if (!buffer) return buffer.status();
    symmetric_ = std::move(*buffer);
    data_ = static_cast<std::byte*>(symmetric_.data());
  } else if (device.on_gpu()) {
    auto plain = allocate_device_memory(num_bytes);
    if (!plain) return plain.status();
    plain_on_gpu_ = std::move(*plain);
    data_ = plain_on_gpu_.get();
  } else {
    plain_.reset(static_cast<std::byte*>(::operator new(num_bytes, kPageAlignment)));
    data_ = plain_.get();
  }
  return device.fill(data_, kStale, num_bytes);
}

Status write_rows(const RankDevice& device, const RowRange& rows,
                  const std::function<void(std::int64_t, std::byte*)>& write) {
  if (!device.on_gpu() || rows.row_bytes == 0) {
    for (std::int64_t row = 0; row < rows.num_rows; ++row) write(row, rows.data + row * rows.row_bytes);
    return {};
  }
  const std::int64_t rows_per_piece = std::max<std::int64_t>(kPieceBytes / rows.row_bytes, 1);
  std::vector<std::byte> piece;
  for (std::int64_t first = 0; first < rows.num_rows; first += rows_per_piece) {
    const std::int64_t count = std::min(rows_per_piece, rows.num_rows - first);
    piece.assign(static_cast<std::size_t>(count * rows.row_bytes), std::byte{kStale});
    for (std::int64_t i = 0; i < count; ++i) write(first + i, piece.data() + i * rows.row_bytes);
    if (Status status = device.copy(rows.data + first * rows.row_bytes, piece.data(), piece.size()); !status) {
      return status;
    }
  }
  return {};
}

Status read_rows(const RankDevice& device, const RowRange& rows,
                 const std::function<Status(std::int64_t, const std::byte*)>& read) {
  const bool direct = !device.on_gpu() || rows.row_bytes == 0;
  const std::int64_t rows_per_piece =
      direct ? std::max<std::int64_t>(rows.num_rows, 1) : std::max<std::int64_t>(kPieceBytes / rows.row_bytes, 1);
  std::vector<std::byte> piece;
  for (std::int64_t first = 0; first < rows.num_rows; first += rows_per_piece) {
    const std::int64_t count = std::min(rows_per_piece, rows.num_rows - first);
    const std::byte* bytes = rows.data + first * rows.row_bytes;
    if (!direct) {
      piece.resize(static_cast<std::size_t>(count * rows.row_bytes));
      if (Status status = device.copy(piece.data(), bytes, piece.size()); !status) return status;
      bytes = piece.data();
    }
    for (std::int64_t i = 0; i < count; ++i) {
      if (Status status = read(first + i, bytes + i * rows.row_bytes); !status) return status;
    }
  }
  return {};
}

Status BenchBuffers::allocate(const BenchPlan& plan, const RankDevice& device, Group& group, std::int64_t num_rows,
                              std::int64_t num_sent_rows) {
  const auto take = [&](BenchBlock& block, BenchMemory memory, std::int64_t size_bytes) {
    return block.allocate(device, group, memory, size_bytes);
  };
  const std::int64_t num_tokens = plan.num_tokens;
  const bool shares_rows = plan.receives_bfloat16();
  // On a GPU the limit is measured between separate buffers.
  if (device.on_gpu()) num_sent_rows = 0;
  Status status;
  if (plan.needs_dispatch_buffers()) {
    const std::int64_t num_limit_rows = std::max(num_rows, num_sent_rows);
    status = take(x, plan.memory, num_tokens * plan.input_bytes());
    if (status) status = take(scales, plan.memory, num_tokens * plan.input_scale_bytes());
    if (status && !shares_rows) status = take(recv_x, plan.memory, num_limit_rows * plan.payload_bytes());
    if (status) status = take(recv_scales, plan.memory, num_rows * plan.scale_bytes());
    const bool with_ids = plan.layout == Layout::kTokens;
    if (status && with_ids)
      status = take(recv_idx, plan.memory, num_rows * plan.num_topk * std::int64_t{sizeof(std::int64_t)});
    if (status && plan.metadata_bytes() > 0) {
      status = take(recv_weights, plan.memory, num_rows * (with_ids ? plan.num_topk : 1) * std::int64_t{sizeof(float)});
    }
    const auto side_bytes = static_cast<std::size_t>(plan.scale_bytes() + plan.metadata_bytes());
    side_in.assign(device.on_gpu() ? 0 : static_cast<std::size_t>(num_tokens) * side_bytes, std::byte{1});
    side_out.assign(static_cast<std::size_t>(num_sent_rows) * side_bytes, std::byte{2});
  }
  if (status && (plan.measures_combine() || shares_rows)) {
    const std::int64_t num_limit_rows = num_sent_rows + (plan.measures_combine() && !device.on_gpu() ? num_tokens : 0);
    status = take(y, plan.memory, std::max(num_rows, num_limit_rows) * plan.combine_row_bytes());
  }
  if (status && plan.measures_combine()) {
    status = take(out, BenchMemory::kPlain, num_tokens * plan.combine_row_bytes());
    const std::int64_t weights_bytes = plan.returns_weights ? plan.num_topk * std::int64_t{sizeof(float)} : 0;
    if (status) status = take(y_weights, BenchMemory::kSymmetric, num_rows * weights_bytes);
    if (status) status = take(out_weights, BenchMemory::kPlain, num_tokens * weights_bytes);
  }
  received = shares_rows ? y.data() : recv_x.data();
  return status;
}

}  // namespace ferry::tools
