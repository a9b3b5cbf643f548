#ifndef FERRY_TOOLS_BENCH_RAW_EXCHANGE_HPP
#define FERRY_TOOLS_BENCH_RAW_EXCHANGE_HPP

/// Kernels that move rows between GPUs and do nothing else: no routing, no flags, no waiting for each other. What they
/// reach is the limit that dispatch and combine are measured against; to that of latency mode a flag's way belongs too.

#include <cstddef>
#include <cstdint>

#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry::tools {

inline constexpr int kMaxRawTargets = 64;

/// What rows are this many bytes, or a multiple of it, apart: a row that starts inside a line of the memory would share
/// that line with the row before, and each of the two would send a part of it.
inline constexpr std::int64_t kRawLineBytes = 128;

/// Rows 0 … num_rows - 1; row i concerns target i % num_targets, and is row i / num_targets of this rank's section
/// there.
struct RawExchangeParams {
  std::byte* sections[kMaxRawTargets] = {};  ///< of the targets' memory, ceil(rows / targets) rows each
  int num_targets = 0;
  std::byte* local = nullptr;  ///< num_rows rows of this rank: what is pushed, and where pulled rows end
  std::int64_t num_rows = 0;
  std::int64_t row_bytes = 0;   ///< a multiple of 16: what is moved of each row
  std::int64_t row_stride = 0;  ///< bytes from row to row everywhere, a multiple of kRawLineBytes
};

/// Write every local row into its target's section: a warp a row, by the bulk copy engine where the GPU has one
/// (sm_90), by 16-byte loads and stores elsewhere. Only puts work on the stream.
Status raw_push(const RawExchangeParams& params, int num_sms, Stream stream);

/// Read every row from its target's section by 16-byte loads, eight in flight per thread, exclusive-or eight rows into
/// one and store that: as a sum does, it stores less than it loads.
Status raw_pull(const RawExchangeParams& params, int num_sms, Stream stream);

/// Flags between this rank and others, each in a line of its own.
struct RawFlagParams {
  std::uint64_t* theirs[kMaxRawTargets] = {};  ///< this rank's flag in the target's memory
  std::uint64_t* mine[kMaxRawTargets] = {};    ///< the target's flag in this rank's memory
  int num_targets = 0;
  std::uint64_t first = 1;  ///< above all values that were stored before
  int num_rounds = 0;
  std::int64_t timeout_ns = 0;      ///< of all rounds together
  std::uint64_t* failed = nullptr;  ///< of this rank: becomes 1 if a target does not answer
};

/// In each round store a number in every target's memory, and wait until each has stored it here: a round takes a
/// flag's way to one other rank. Every rank must run it at the same time. Only puts work on the stream.
Status raw_flag_rounds(const RawFlagParams& params, Stream stream);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_RAW_EXCHANGE_HPP
