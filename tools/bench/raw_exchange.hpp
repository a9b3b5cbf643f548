#ifndef FERRY_TOOLS_BENCH_RAW_EXCHANGE_HPP
#define FERRY_TOOLS_BENCH_RAW_EXCHANGE_HPP

/// Kernels that only move rows between GPUs: no routing, no flags, no waiting for other ranks. Their rate is the limit
/// for dispatch and combine; the limit of latency mode also includes a flag's round trip.

#include <cstddef>
#include <cstdint>

#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry::tools {

inline constexpr int kMaxRawTargets = 64;

/// Distance of rows is a multiple of this: a row that starts inside a memory line would share the line with the
/// previous row, and each of the two would send a part of it.
inline constexpr std::int64_t kRawLineBytes = 128;

/// Rows 0 … num_rows - 1; row i belongs to target i % num_targets, and is row i / num_targets of this rank's section
/// there.
struct RawExchangeParams {
  std::byte* sections[kMaxRawTargets] = {};  ///< in the targets' memory, ceil(rows / targets) rows each
  int num_targets = 0;
  std::byte* local = nullptr;  ///< num_rows rows of this rank: source of a push, destination of a pull
  std::int64_t num_rows = 0;
  std::int64_t row_bytes = 0;   ///< bytes moved of each row; a multiple of 16
  std::int64_t row_stride = 0;  ///< bytes from row to row on both sides; a multiple of kRawLineBytes
};

/// Writes every local row into its target's section, one warp per row: with the bulk copy engine if the GPU has one
/// (sm_90), otherwise with 16-byte loads and stores. Only puts work on the stream.
Status raw_push(const RawExchangeParams& params, int num_sms, Stream stream);

/// Reads every row from its target's section with 16-byte loads, eight in flight per thread, and stores the exclusive
/// or of eight rows: like a sum, it stores less than it loads.
Status raw_pull(const RawExchangeParams& params, int num_sms, Stream stream);

/// Flags between this rank and others, each in a separate line.
struct RawFlagParams {
  std::uint64_t* theirs[kMaxRawTargets] = {};  ///< this rank's flag in the target's memory
  std::uint64_t* mine[kMaxRawTargets] = {};    ///< the target's flag in this rank's memory
  int num_targets = 0;
  std::uint64_t first = 1;  ///< greater than all values stored before
  int num_rounds = 0;
  std::int64_t timeout_ns = 0;      ///< for all rounds together
  std::uint64_t* failed = nullptr;  ///< in this rank's memory: becomes 1 if a target does not answer
};

/// In each round stores a number in every target's memory and waits until each target has stored it here: a round takes
/// as long as a flag's way to another rank. All ranks must run it at the same time. Only puts work on the stream.
Status raw_flag_rounds(const RawFlagParams& params, Stream stream);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_RAW_EXCHANGE_HPP
