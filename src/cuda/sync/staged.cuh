#ifndef FERRY_CUDA_SYNC_STAGED_CUH
#define FERRY_CUDA_SYNC_STAGED_CUH

/// Reports which rows a rank has staged for its peers. Each staging block reports alone: waiting for the other blocks
/// first would add two trips to memory and a turn to a wait on which peers already depend. Rows are dealt to the B
/// staging blocks: row i for a peer belongs to block i % B, in its round i / B. A word counts the rounds that are
/// complete. Rows that are quantised are staged for this rank too.
///
///   word              writer                     order                publishes
///   marks[w], shared  warp w of a staging block  st.release.cta /     the warp's writes in rounds before that one,
///                                                ld.acquire.cta       bulk stores complete
///   staged[s][b]      block b of rank s          fence.acq_rel.sys,   the block's rows in that many rounds
///                                                st.relaxed.sys /
///                                                ld.acquire.sys
///   known[s], shared  a warp of a summing block  st.release.cta /     that many first rows of rank s, as counted by
///                                                ld.acquire.cta       the words of `staged`

#include "cuda/sync/chunks.cuh"

namespace ferry::cuda::device {

/// Means all rounds of a block, or all rows of a rank, whatever their number.
inline constexpr std::uint32_t kAllStaged = 0xFFFFFFFFU;

/// Marks the progress of a staging warp.
class RoundMarker {
 public:
  /// `mark`: this warp's word in shared memory, initially 0.
  __device__ explicit RoundMarker(std::uint32_t* mark) : mark_(mark) {}

  /// Marks that this warp's writes of all rounds before `round` are complete (every lane's own, bulk ones included).
  /// All lanes call it.
  __device__ void mark_before(std::uint32_t round) {
    if (round <= marked_) return;
    marked_ = round;
    fence_async_proxy();
    __syncwarp();
    if (lane_idx() == 0) store_release_block(mark_, round);
  }

 private:
  std::uint32_t* mark_;
  std::uint32_t marked_ = 0;
};

struct RoundReports {
  int block = 0;                 ///< of this rank's staging blocks
  int num_warps = 1;             ///< warps that mark
  std::uint32_t num_rounds = 1;  ///< least number of rounds between two reports; fewer between the first ones
};

/// Reports the marks of this block's warps to the peers, and if `kToSelf` to this rank, until all rounds are marked.
/// All lanes of another warp of the block call it, after all ranks have entered the call.
template <bool kToSelf>
__device__ inline void report_rounds(const RankParams& ranks, std::uint64_t epoch, const RoundReports& reports,
                                     const std::uint32_t* marks) {
  const auto load_least = [marks, &reports](auto load) {
    return __reduce_min_sync(kAllLanes, lane_idx() < reports.num_warps ? load(marks + lane_idx()) : kAllStaged);
  };
  std::uint32_t reported = 0;
  // The loop is bounded: the warps that mark are running and wait for no other rank.
  while (reported != kAllStaged) {
    // Peers begin with the first rounds. Later they still have as many rounds to sum as were reported before.
    const std::uint32_t enough = reported < reports.num_rounds ? reported : reports.num_rounds;
    const std::uint32_t there = load_least(load_relaxed_block);
    if (there == reported || (there - reported < enough && there != kAllStaged)) continue;
    const std::uint32_t least = load_least(load_acquire_block);
    __syncwarp();  // passes the data that each lane acquired to all lanes
    fence_system();
    const std::size_t word = static_cast<std::size_t>(ranks.rank) * kMaxCallBlocks + reports.block;
    for (int rank = lane_idx(); rank < ranks.num_ranks; rank += kWarpLanes) {
      if (kToSelf || rank != ranks.rank) {
        store_relaxed_system(control_of(ranks, rank).staged + word, progress_value(epoch, least));
      }
    }
    reported = least;
  }
}

/// Rows that a lane waits for: the first `num_rows` rows of `rank`, which stages with `num_blocks` blocks.
struct AwaitedRows {
  int rank = 0;
  int num_blocks = 1;
  std::uint32_t num_rows = 0;  ///< 0: nothing is awaited
};

/// Waits, in one thread, for a word of `staged`; false if the group broke. A failed wait reports its progress in rows:
/// the number of rows that are staged when all blocks have completed that many rounds.
__device__ inline bool wait_rounds(const RankParams& ranks, const AwaitedRows& rows, std::uint64_t epoch, int block,
                                   std::uint32_t num_rounds) {
  const std::uint64_t* word = ranks.control.staged + static_cast<std::size_t>(rows.rank) * kMaxCallBlocks + block;
  const auto round_rows = static_cast<std::uint64_t>(rows.num_blocks);
  const std::uint64_t expected = num_rounds * round_rows;
  const auto read = [word, epoch, expected, round_rows] {
    const std::uint64_t seen = rows_reported(load_acquire_system(word), epoch) * round_rows;
    if (seen < expected) pause();
    return seen;
  };
  return wait_until(ranks, {Awaited::kRows, rows.rank, epoch}, read, expected, StepCount(ranks, rows.rank));
}

/// Reads once all words of a rank that stages with `num_blocks` blocks, and notes in `known` how many rows are staged.
/// Returns the rounds of the block with this lane's number. All lanes call it.
__device__ inline std::uint32_t look_at_staged(const RankParams& ranks, int rank, int num_blocks, std::uint64_t epoch,
                                               std::uint32_t* known) {
  const std::uint64_t* words = ranks.control.staged + static_cast<std::size_t>(rank) * kMaxCallBlocks;
  std::uint32_t own = 0;
  std::uint32_t num_rows = kAllStaged;
  for (int block = lane_idx(); block < num_blocks; block += kWarpLanes) {
    const auto rounds = static_cast<std::uint32_t>(rows_reported(load_acquire_system(words + block), epoch));
    if (block == lane_idx()) own = rounds;
    if (rounds == kAllStaged) continue;
    const std::uint32_t before = rounds * static_cast<std::uint32_t>(num_blocks) + static_cast<std::uint32_t>(block);
    if (before < num_rows) num_rows = before;
  }
  num_rows = __reduce_min_sync(kAllLanes, num_rows);
  __syncwarp();  // passes the data that each lane acquired to lane 0
  if (lane_idx() == 0) store_release_block(known + rank, num_rows);
  return own;
}

/// Waits until the rows that any lane awaits are staged; false in all lanes if the group broke. `known`: [R], shared by
/// the block. All lanes call it. Not inlined: each warp waits only a few times for a rank's rows.
__device__ __noinline__ inline bool await_staged(const RankParams& ranks, const AwaitedRows& rows, std::uint64_t epoch,
                                                 std::uint32_t* known) {
  // Another warp of the block may already have noted the rows.
  bool here = rows.num_rows == 0 || rows.num_rows <= load_acquire_block(known + rows.rank);
  unsigned missing = __ballot_sync(kAllLanes, static_cast<int>(!here));
  bool alive = true;
  if (missing != 0 && __any_sync(kAllLanes, static_cast<int>(rows.num_rows == kAllStaged)) != 0) {
    for (; missing != 0 && alive; missing &= missing - 1) {
      const int lane = __ffs(static_cast<int>(missing)) - 1;
      AwaitedRows all{__shfl_sync(kAllLanes, rows.rank, lane), __shfl_sync(kAllLanes, rows.num_blocks, lane)};
      for (int block = lane_idx(); block < all.num_blocks; block += kWarpLanes) {
        alive = wait_rounds(ranks, all, epoch, block, kAllStaged) && alive;
      }
      alive = __all_sync(kAllLanes, static_cast<int>(alive)) != 0;
      if (alive) look_at_staged(ranks, all.rank, all.num_blocks, epoch, known);
    }
  } else if (missing != 0) {
    // The warp reads all words of one rank; for the other ranks each lane waits for its own row only.
    const int lane = __ffs(static_cast<int>(missing)) - 1;
    const int rank = __shfl_sync(kAllLanes, rows.rank, lane);
    const std::uint32_t rounds =
        look_at_staged(ranks, rank, __shfl_sync(kAllLanes, rows.num_blocks, lane), epoch, known);
    const auto num_blocks = static_cast<std::uint32_t>(rows.num_blocks);
    const std::uint32_t row = rows.num_rows - 1;  // valid if the lane awaits a row
    const std::uint32_t round = row / num_blocks;
    const auto block = static_cast<int>(row - round * num_blocks);
    const std::uint32_t rounds_there = __shfl_sync(kAllLanes, rounds, block & (kWarpLanes - 1));
    here = here || (rows.rank == rank && block < kWarpLanes && round < rounds_there);
    if (!here) alive = wait_rounds(ranks, rows, epoch, block, round + 1);
    alive = __all_sync(kAllLanes, static_cast<int>(alive)) != 0;
  }
  __syncwarp();  // passes the data that each lane acquired to all lanes
  return alive;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_STAGED_CUH
