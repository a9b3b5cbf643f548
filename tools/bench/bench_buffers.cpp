#include "bench/bench_buffers.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/bfloat16.hpp"
#include "common/hash.hpp"

namespace ferry::tools {

namespace {

/// Windows that rows are spread over: two rows look alike once in so many.
constexpr std::size_t kNumWindows = 1 << 16;
/// What untouched memory holds instead of the pattern, so that a row that nobody wrote is seen.
constexpr int kStale = 0x5A;

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

Status BenchBlock::allocate(Group& group, BenchMemory memory, std::int64_t size_bytes) {
  const auto num_bytes = static_cast<std::size_t>(std::max<std::int64_t>(size_bytes, 1));
  if (memory == BenchMemory::kSymmetric) {
    auto buffer = group.allocate(num_bytes);
    if (!buffer) return buffer.status();
    symmetric_ = std::move(*buffer);
    data_ = static_cast<std::byte*>(symmetric_.data());
  } else {
    plain_.reset(static_cast<std::byte*>(::operator new(num_bytes, kPageAlignment)));
    data_ = plain_.get();
  }
  std::memset(data_, kStale, num_bytes);
  return {};
}

Status BenchBuffers::allocate(const BenchPlan& plan, Group& group, std::int64_t num_rows, std::int64_t num_sent_rows) {
  const auto take = [&](BenchBlock& block, BenchMemory memory, std::int64_t size_bytes) {
    return block.allocate(group, memory, size_bytes);
  };
  const std::int64_t num_tokens = plan.num_tokens;
  const bool shares_rows = plan.dtype == BenchDType::kBfloat16;
  Status status;
  if (plan.measures_dispatch()) {
    const std::int64_t num_limit_rows = std::max(num_rows, num_sent_rows);
    status = take(x, plan.memory, num_tokens * plan.payload_bytes());
    if (status) status = take(scales, plan.memory, num_tokens * plan.scale_bytes());
    if (status && !shares_rows) status = take(recv_x, plan.memory, num_limit_rows * plan.payload_bytes());
    if (status) status = take(recv_scales, plan.memory, num_rows * plan.scale_bytes());
    const bool with_ids = plan.layout == Layout::kTokens;
    if (status && with_ids)
      status = take(recv_idx, plan.memory, num_rows * plan.num_topk * std::int64_t{sizeof(std::int64_t)});
    if (status) {
      status = take(recv_weights, plan.memory, num_rows * (with_ids ? plan.num_topk : 1) * std::int64_t{sizeof(float)});
    }
    const auto side_bytes = static_cast<std::size_t>(plan.scale_bytes() + plan.metadata_bytes());
    side_in.assign(static_cast<std::size_t>(num_tokens) * side_bytes, std::byte{1});
    side_out.assign(static_cast<std::size_t>(num_sent_rows) * side_bytes, std::byte{2});
  }
  if (status && (plan.measures_combine() || shares_rows)) {
    const std::int64_t num_limit_rows = num_sent_rows + (plan.measures_combine() ? num_tokens : 0);
    status = take(y, plan.memory, std::max(num_rows, num_limit_rows) * plan.combine_row_bytes());
  }
  if (status && plan.measures_combine()) {
    status = take(out, BenchMemory::kPlain, num_tokens * plan.combine_row_bytes());
  }
  received = shares_rows ? y.data() : recv_x.data();
  return status;
}

}  // namespace ferry::tools
