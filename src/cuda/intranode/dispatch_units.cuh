#ifndef FERRY_CUDA_INTRANODE_DISPATCH_UNITS_CUH
#define FERRY_CUDA_INTRANODE_DISPATCH_UNITS_CUH

/// Runs, the rows that one rank sends to another, divided into the units that warps move: a few contiguous whole rows,
/// or one piece of a long row.

#include "cuda/intranode/dispatch_stages.cuh"

namespace ferry::cuda::device {

/// Most warps of a block that move runs; each uses the stages of several warps.
inline constexpr int kRunWarps = 8;
static_assert(kRunWarps % DispatchParams::kFewRunWarps == 0);
inline constexpr int kRunStageBytes = kDispatchWarps / kRunWarps * kStageBytes;
static_assert(kRunStageBytes % kLandingBytes == 0);

/// Stage size of a warp when `num_warps` warps, kRunWarps or kFewRunWarps, move runs.
FERRY_HOST_DEVICE constexpr int run_stage_bytes(int num_warps) { return kRunStageBytes * (kRunWarps / num_warps); }

/// Scale words that a lane of a sending warp holds: two rows of 7168 channels have 112.
inline constexpr int kRunScaleWords = 4;
/// Longest records of a unit that land with its rows.
inline constexpr int kUnitRecordBytes = 512;
/// Barriers of a warp: one for each stage's loads, and one for tables.
inline constexpr int kRunBarriers = kStages + 1;

/// Tables of a unit's rows as they land in a sending warp's shared memory. Each lane uses only the values that it
/// fetched; lane r * K + k fetches entry k of row r. Values loaded into registers ahead of their use would be awaited
/// at once, where the compiler moves them between registers.
struct FetchedTables {
  std::int32_t homes[kWarpLanes];
  float weights[kWarpLanes];
  std::uint32_t scale_words[kRunScaleWords][kWarpLanes];
};

/// Shared memory of one warp.
struct RunStages {
  std::byte* data;          ///< [kStages, stage_bytes]
  std::byte* records;       ///< [kStages, kUnitRecordBytes] of a receiving warp
  FetchedTables* tables;    ///< of a sending warp
  std::uint64_t* barriers;  ///< [kStages] for loads, and one for tables
  int stage_bytes;
  std::uint32_t parities = 0;  ///< bit s: parity that the next phase of barrier s completes

  __device__ std::byte* stage(int idx) const { return data + idx * stage_bytes; }
  __device__ std::byte* record(int idx) const { return records + idx * kUnitRecordBytes; }
  __device__ std::uint64_t* tables_barrier() const { return barriers + kStages; }
  /// Must be called exactly once for each phase of a barrier.
  __device__ void wait(int barrier) {
    wait_barrier(barriers + barrier, parities >> barrier & 1U);
    parities ^= 1U << barrier;
  }
};
/// Rows that one rank sends to another: contiguous at the receiver, in token order. In shared memory, one per rank.
struct Run {
  std::int32_t first_row;  ///< at the receiver
  std::int32_t num_rows;
};

/// Run that this rank receives from `source`. Empty for this rank itself: rows that stay on this GPU go straight to its
/// outputs.
__device__ inline Run run_from(const DispatchParams& params, int source) {
  const std::int32_t first_row = params.source_base[source];
  return {first_row, source == params.ranks.rank ? 0 : params.source_base[source + 1] - first_row};
}

/// Number of ranks over which work for the other ranks is dealt; 1 if there are no others.
__device__ inline int num_peers(const RankParams& ranks) { return ranks.num_ranks > 1 ? ranks.num_ranks - 1 : 1; }

/// How runs are divided into units; each unit fills one stage.
struct UnitShape {
  int num_rows = 1;    ///< rows of a unit
  int num_pieces = 1;  ///< pieces of a row
  std::int64_t piece_bytes = 0;

  /// Shape with at most `most_rows` rows per unit. Rows of 0 bytes stand for units that move tables only.
  __device__ static UnitShape of(std::int64_t row_bytes, int num_topk, int stage_bytes, int most_rows = kWarpLanes) {
    UnitShape shape;
    const auto pieces = static_cast<int>((row_bytes + stage_bytes - 1) / stage_bytes);
    shape.num_pieces = pieces < 1 ? 1 : pieces;
    const std::int64_t share = (row_bytes + shape.num_pieces - 1) / shape.num_pieces;
    shape.piece_bytes = (share + kLandingBytes - 1) / kLandingBytes * kLandingBytes;
    if (shape.piece_bytes > row_bytes) shape.piece_bytes = row_bytes;
    if (shape.num_pieces > 1) return shape;
    // One lane per entry of a unit's rows.
    const int entry_rows = num_topk < kWarpLanes ? kWarpLanes / num_topk : 1;
    const std::int64_t fit = row_bytes > 0 ? stage_bytes / row_bytes : kWarpLanes;
    shape.num_rows = entry_rows < most_rows ? entry_rows : most_rows;
    if (fit < shape.num_rows) shape.num_rows = static_cast<int>(fit);
    return shape;
  }

  /// Bytes of each row of a unit in piece `piece`.
  __device__ std::uint32_t bytes_of(std::int64_t row_bytes, int piece) const {
    const std::int64_t left = row_bytes - piece * piece_bytes;
    return static_cast<std::uint32_t>(left < piece_bytes ? left : piece_bytes);
  }
};

struct Unit {
  int rank = -1;  ///< -1: no unit is left
  std::int32_t row = 0;
  int num_rows = 0;
  int piece = 0;
};

/// Ranks that a block sends to or receives from: `num` ranks starting with `first`, wrapping after the last rank.
struct RunTargets {
  int first = 0;
  int num = 1;
};

/// Units of one warp, dealt over the targets in turn, so that the warp writes to all targets throughout. A target's
/// rows ascend.
class UnitWalk {
 public:
  __device__ UnitWalk(const Run* runs, const UnitShape& shape, const RunTargets& targets, int num_ranks, int warp,
                      int num_warps)
      : runs_(runs), shape_(shape), targets_(targets), num_ranks_(num_ranks), walk_(targets.num, warp, num_warps) {}

  /// Called after the runs are in shared memory.
  __device__ void begin() {
    std::int32_t most_rows = 0;
    for (int i = 0; i < targets_.num; ++i) {
      const std::int32_t num_rows = runs_[rank_of(i)].num_rows;
      most_rows = num_rows > most_rows ? num_rows : most_rows;
    }
    num_units_ = (most_rows + shape_.num_rows - 1) / shape_.num_rows * shape_.num_pieces;
  }

  __device__ const UnitShape& shape() const { return shape_; }

  __device__ Unit next() {
    for (; walk_.idx() < num_units_; walk_.advance()) {
      Unit unit;
      const int rank = rank_of(walk_.owner());
      const int rows_idx = shape_.num_pieces == 1 ? walk_.idx() : walk_.idx() / shape_.num_pieces;
      unit.row = rows_idx * shape_.num_rows;
      unit.piece = walk_.idx() - rows_idx * shape_.num_pieces;
      const std::int32_t left = runs_[rank].num_rows - unit.row;
      if (left <= 0) continue;
      unit.num_rows = left < shape_.num_rows ? left : shape_.num_rows;
      unit.rank = rank;
      walk_.advance();
      return unit;
    }
    return {};
  }

 private:
  __device__ int rank_of(int target) const {
    const int rank = targets_.first + target;
    return rank < num_ranks_ ? rank : rank - num_ranks_;
  }

  const Run* runs_;
  UnitShape shape_;
  RunTargets targets_;
  int num_ranks_;
  TurnWalk walk_;
  int num_units_ = 0;
};

/// Stores `num_rows` rows of `bytes` that are contiguous at `from`, in shared memory. All lanes call it; each lane then
/// closes the group of its stores.
__device__ inline void store_rows(std::byte* to, std::int64_t stride, const std::byte* from, std::uint32_t bytes,
                                  int num_rows) {
  const int lane = lane_idx();
  if (stride == bytes) {
    if (lane == 0) start_store(to, from, bytes * static_cast<std::uint32_t>(num_rows));
  } else if (lane < num_rows) {
    start_store(to + lane * stride, from + lane * static_cast<int>(bytes), bytes);
  }
}

__device__ inline int stage_after(int stage) { return stage + 1 == kStages ? 0 : stage + 1; }
__device__ inline int stage_before(int stage) { return stage == 0 ? kStages - 1 : stage - 1; }

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_DISPATCH_UNITS_CUH
