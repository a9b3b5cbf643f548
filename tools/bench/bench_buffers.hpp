#ifndef FERRY_TOOLS_BENCH_BENCH_BUFFERS_HPP
#define FERRY_TOOLS_BENCH_BENCH_BUFFERS_HPP

/// Memory of one rank, and the pattern with which its rows are filled and checked.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <vector>

#include "bench/bench_plan.hpp"
#include "device/rank_device.hpp"
#include "ferry/group.hpp"

namespace ferry::tools {

/// Rows by (source rank, source token): windows into one random tile of finite bf16 values, so that one copy writes a
/// whole row and one comparison checks it. As opaque bytes the same windows serve as FP8 rows and scales.
class RowPattern {
 public:
  RowPattern(std::uint64_t seed, std::int64_t max_row_bytes);
  const std::byte* row(int source_rank, std::int64_t source_token) const;

 private:
  std::uint64_t seed_;
  std::vector<std::uint16_t> tile_;
};

/// Block in symmetric memory or in this rank's own (in a CUDA group its GPU's), with every page touched.
class BenchBlock {
 public:
  Status allocate(const RankDevice& device, Group& group, BenchMemory memory, std::int64_t size_bytes);
  std::byte* data() const { return data_; }
  std::byte* row(std::int64_t row_idx, std::int64_t row_bytes) const { return data_ + row_idx * row_bytes; }

 private:
  struct FreePages {
    void operator()(std::byte* data) const { ::operator delete(data, kPageAlignment); }
  };
  /// Alignment of symmetric memory, so that both kinds are measured alike.
  static constexpr std::align_val_t kPageAlignment{4096};

  Buffer symmetric_;
  std::unique_ptr<std::byte, FreePages> plain_;
  DeviceMemory plain_on_gpu_;
  std::byte* data_ = nullptr;
};

/// All blocks of a rank. Blocks that the operation does not use stay empty.
struct BenchBuffers {
  BenchBlock ids;  ///< [T, K] i64 and weights [T, K] f32 of route, if the group cannot read the host's
  BenchBlock weights;
  BenchBlock counters;      ///< i64: [E] logical, [P] physical, [L] received; if load is counted
  BenchBlock x;             ///< [T, H] input of dispatch
  BenchBlock scales;        ///< [T, S]
  BenchBlock recv_x;        ///< [rows, H] output of dispatch; empty if `y` serves for it
  BenchBlock recv_scales;   ///< [rows, S]
  BenchBlock recv_idx;      ///< kTokens: [rows, K] i64
  BenchBlock recv_weights;  ///< kTokens: [rows, K] f32, else [rows]
  BenchBlock y;             ///< input of combine, and output of dispatch if that is bf16; holds the limit's copies too
  BenchBlock out;           ///< [T, H] bf16
  BenchBlock y_weights;     ///< [rows, K] f32 in memory of the group, as dispatch leaves them, if combine returns them
  BenchBlock out_weights;   ///< [T, K] f32
  std::vector<std::byte> side_in;   ///< scales and metadata of T tokens, for the limit's copies
  std::vector<std::byte> side_out;  ///< scales and metadata of all rows sent
  std::byte* received = nullptr;    ///< output of dispatch: recv_x or y

  Status allocate(const BenchPlan& plan, const RankDevice& device, Group& group, std::int64_t num_rows,
                  std::int64_t num_sent_rows);
};

/// Consecutive rows of a block.
struct RowRange {
  std::byte* data = nullptr;
  std::int64_t num_rows = 0;
  std::int64_t row_bytes = 0;
};

/// Calls `write(row, bytes)` for each row; bytes that it does not write are stale. On a GPU through pieces in host
/// memory.
Status write_rows(const RankDevice& device, const RowRange& rows,
                  const std::function<void(std::int64_t, std::byte*)>& write);
/// Calls `read(row, bytes)` for each row, until a call fails.
Status read_rows(const RankDevice& device, const RowRange& rows,
                 const std::function<Status(std::int64_t, const std::byte*)>& read);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_BENCH_BUFFERS_HPP
