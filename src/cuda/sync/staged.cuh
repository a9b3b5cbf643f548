#ifndef FERRY_CUDA_SYNC_STAGED_CUH
#define FERRY_CUDA_SYNC_STAGED_CUH

/// Which rows a rank has staged for its peers, reported by each of its staging blocks alone: a block that waited for
/// the others before it reported would add two trips to memory and a turn to what peers wait for anyway. Rows are dealt
/// to the B staging blocks: of the rows for each peer number i is block i % B's, in its round i / B. A word counts the
/// rounds that are there.
///
///   marks[w], shared   warp w of a staging block   st.release.cta / ld.acquire.cta   what the warp wrote in rounds
///                                                                  before that one, bulk stores complete
///   staged[s][b]       block b of rank s           fence.acq_rel.sys, st.relaxed.sys / ld.acquire.sys   the block's
///                                                                  rows of so many rounds
///   known[s], shared   a warp of a summing block   st.release.cta / ld.acquire.cta   so many rows of rank s, the
///                                                                  first ones: what words of `staged` say of them

#include "cuda/sync/chunks.cuh"

namespace ferry::cuda::device {

/// All of a block's rounds, however many; all of a rank's rows.
inline constexpr std::uint32_t kAllStaged = 0xFFFFFFFFU;

/// What a staging warp says of its progress.
class RoundMarker {
 public:
  /// `mark`: this warp's word in shared memory, 0 before.
  __device__ explicit RoundMarker(std::uint32_t* mark) : mark_(mark) {}

  /// This warp's writes of all rounds before `round` are complete (every lane's own, bulk ones included). All lanes.
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
  int num_warps = 1;             ///< that mark
  std::uint32_t num_rounds = 1;  ///< between two reports, at least; of the first ones fewer
};

/// Reports to the peers what the warps of this block mark, until they have marked everything. All lanes of another warp
/// of the block, after all ranks have entered the call.
__device__ inline void report_rounds(const RankParams& ranks, std::uint64_t epoch, const RoundReports& reports,
                                     const std::uint32_t* marks) {
  const auto load_least = [marks, &reports](auto load) {
    return __reduce_min_sync(kAllLanes, lane_idx() < reports.num_warps ? load(marks + lane_idx()) : kAllStaged);
  };
  std::uint32_t reported = 0;
  // Bounded: the warps that mark are running, and wait for nothing else.
  while (reported != kAllStaged) {
    // Peers begin with the first rounds. Later they have as many left as were reported before.
    const std::uint32_t enough = reported < reports.num_rounds ? reported : reports.num_rounds;
    const std::uint32_t there = load_least(load_relaxed_block);
    if (there == reported || (there - reported < enough && there != kAllStaged)) continue;
    const std::uint32_t least = load_least(load_acquire_block);
    __syncwarp();  // hands what each lane has acquired to all of them
    fence_system();
    const std::size_t word = static_cast<std::size_t>(ranks.rank) * kMaxCallBlocks + reports.block;
    for (int rank = lane_idx(); rank < ranks.num_ranks; rank += kWarpLanes) {
      if (rank != ranks.rank) store_relaxed_system(control_of(ranks, rank).staged + word, progress_value(epoch, least));
    }
    reported = least;
  }
}

/// Rows that a lane waits for: the first `num_rows` of `rank`, which stages with `num_blocks` blocks.
struct AwaitedRows {
  int rank = 0;
  int num_blocks = 1;
  std::uint32_t num_rows = 0;  ///< 0: nothing is awaited
};

/// One thread's wait for a word of `staged`; false when the group broke. What is reported of it are rows: as many as
/// there are when all blocks have come as far.
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

/// Looks once at all words of a rank that stages with `num_blocks` blocks, and notes in `known` which rows are there.
/// Returns the rounds of the block of this lane's number. All lanes.
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
  __syncwarp();  // hands what each lane has acquired to lane 0
  if (lane_idx() == 0) store_release_block(known + rank, num_rows);
  return own;
}

/// Waits until everything is there that any lane awaits; false in all lanes when the group broke. `known`: [R], shared
/// by the block. All lanes. Not inlined: of a rank's rows each warp waits a few times.
__device__ __noinline__ inline bool await_staged(const RankParams& ranks, const AwaitedRows& rows, std::uint64_t epoch,
                                                 std::uint32_t* known) {
  // What another warp of the block has found.
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
    // Of one rank all is learnt; of the others, that the row is there.
    const int lane = __ffs(static_cast<int>(missing)) - 1;
    const int rank = __shfl_sync(kAllLanes, rows.rank, lane);
    const std::uint32_t rounds =
        look_at_staged(ranks, rank, __shfl_sync(kAllLanes, rows.num_blocks, lane), epoch, known);
    const auto num_blocks = static_cast<std::uint32_t>(rows.num_blocks);
    const std::uint32_t row = rows.num_rows - 1;  // where any is awaited
    const std::uint32_t round = row / num_blocks;
    const auto block = static_cast<int>(row - round * num_blocks);
    const std::uint32_t rounds_there = __shfl_sync(kAllLanes, rounds, block & (kWarpLanes - 1));
    here = here || (rows.rank == rank && block < kWarpLanes && round < rounds_there);
    if (!here) alive = wait_rounds(ranks, rows, epoch, block, round + 1);
    alive = __all_sync(kAllLanes, static_cast<int>(alive)) != 0;
  }
  __syncwarp();  // hands what each lane has acquired to all of them
  return alive;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_STAGED_CUH
