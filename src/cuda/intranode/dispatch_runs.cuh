#ifndef FERRY_CUDA_INTRANODE_DISPATCH_RUNS_CUH
#define FERRY_CUDA_INTRANODE_DISPATCH_RUNS_CUH

/// Sending receiver by receiver, into its outputs or its staging. What one rank sends to another lies there side by
/// side, in token order: rows, and scales, ids and weights, or the records that hold them. So a warp takes a few such
/// rows at once, and writes each of them as one piece of memory. Where rows are long, it takes a piece of one.
///
/// Blocks that send to peers send to nobody else, so that what they offer is what the links take: this rank's own rows
/// have blocks of their own.

#include "cuda/copy/warp_copy.cuh"
#include "cuda/intranode/dispatch_tables.cuh"

namespace ferry::cuda::device {

/// Warps of a block that send so; each has the stages of several others.
inline constexpr int kRunWarps = 8;
inline constexpr int kRunStageBytes = kDispatchWarps / kRunWarps * kStageBytes;
static_assert(kRunStageBytes % kLandingBytes == 0);
/// Of a warp: of each stage's loads, and of tables.
inline constexpr int kRunBarriers = kStages + 1;

/// What this rank sends to one rank. In shared memory, one per rank.
struct Run {
  std::int32_t first_row;  ///< at the receiver
  std::int32_t num_rows;
};

/// How runs are cut into units, each one stage full.
struct UnitShape {
  int num_rows = 1;    ///< of a unit
  int num_pieces = 1;  ///< of a row
  std::int64_t piece_bytes = 0;

  __device__ static UnitShape of(const DispatchParams& params) {
    UnitShape shape;
    const auto pieces = static_cast<int>((params.row_bytes + kRunStageBytes - 1) / kRunStageBytes);
    shape.num_pieces = pieces < 1 ? 1 : pieces;
    const std::int64_t share = (params.row_bytes + shape.num_pieces - 1) / shape.num_pieces;
    shape.piece_bytes = (share + kLandingBytes - 1) / kLandingBytes * kLandingBytes;
    if (shape.piece_bytes > params.row_bytes) shape.piece_bytes = params.row_bytes;
    // One lane per entry of a unit's rows.
    const int most_rows = params.num_topk < kWarpLanes ? kWarpLanes / params.num_topk : 1;
    if (shape.num_pieces == 1) {
      const std::int64_t fit = kRunStageBytes / params.row_bytes;
      shape.num_rows = fit < most_rows ? static_cast<int>(fit) : most_rows;
    }
    return shape;
  }
};

struct Unit {
  int rank = -1;  ///< -1: no more
  std::int32_t row = 0;
  int num_rows = 0;
  int piece = 0;
};

/// The ranks that a block sends to: `num` of them from `first` on, and on past the last rank.
struct RunTargets {
  int first = 0;
  int num = 1;
};

/// The units of one warp, dealt over the targets in turn, so that all of them are written to all the time.
class UnitWalk {
 public:
  __device__ UnitWalk(const Run* runs, const UnitShape& shape, const RunTargets& targets, int num_ranks, int warp,
                      int num_warps)
      : runs_(runs), shape_(shape), targets_(targets), num_ranks_(num_ranks), walk_(targets.num, warp, num_warps) {}

  /// Once the runs are there.
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

/// Chunks of rows in which this rank's progress is reported, of the longest run to a peer.
__device__ inline ChunkBorders run_chunks(const DispatchParams& params, const Run* runs) {
  std::int32_t most_rows = 1;
  for (int rank = 0; rank < params.ranks.num_ranks; ++rank) {
    if (rank != params.ranks.rank && runs[rank].num_rows > most_rows) most_rows = runs[rank].num_rows;
  }
  return {(most_rows + kBorderRows - 1) / kBorderRows, params.run_chunk_blocks};
}

/// Tables of a unit's rows as they land in a warp's shared memory. What a lane fetches it alone uses; entry k of row r
/// is lane r * K + k's. Loaded into registers ahead of their use they would be waited for at once, where the compiler
/// moves them on.
struct FetchedTables {
  std::int32_t homes[kWarpLanes];
  float weights[kWarpLanes];
  std::uint32_t scale_words[kHeldScaleWords][kWarpLanes];
};

/// One warp's shared memory.
struct RunStages {
  std::byte* data;          ///< [kStages, kRunStageBytes]
  std::uint64_t* barriers;  ///< [kStages] of loads
  FetchedTables* tables;
  std::uint64_t* tables_barrier;
};

class RunSender {
 public:
  __device__ RunSender(const DispatchParams& params, const Receiver* receivers, const Run* runs,
                       const RunStages& stages, const RunTargets& targets, int warp, int num_warps)
      : params_(params),
        receivers_(receivers),
        runs_(runs),
        stages_(stages.data),
        barriers_(stages.barriers),
        tables_(stages.tables),
        tables_barrier_(stages.tables_barrier),
        walk_(runs, UnitShape::of(params), targets, params.ranks.num_ranks, warp, num_warps),
        entry_row_(lane_idx() / params.num_topk),
        entry_topk_(lane_idx() - entry_row_ * params.num_topk),
        num_scales_(params.scales.num_scales) {
    if (params.scales.element_bytes != 4) return;
#pragma unroll
    for (int i = 0; i < kHeldScaleWords; ++i) {
      const int word = lane_idx() + i * kWarpLanes;
      scale_rows_[i] = word / num_scales_;
      scale_columns_[i] = word - scale_rows_[i] * num_scales_;
    }
  }

  /// Starts to load what is sent first. Reads only this rank's inputs.
  __device__ void prime() {
    walk_.begin();
    now_ = walk_.next();
    next_ = walk_.next();
    ahead_ = walk_.next();
    now_token_ = load_token(now_);
    next_token_ = load_token(next_);
    ahead_token_ = load_token(ahead_);
    start_unit(now_, now_token_, 0);
    start_unit(next_, next_token_, 1);
    fetch_tables(now_, now_token_);
  }

  /// Waits for what `prime` started, when nothing is to be sent.
  __device__ void drop() {
    if (now_.rank >= 0) wait_barrier(barriers_, 0);
    if (next_.rank >= 0) wait_barrier(barriers_ + 1, 0);
    if (now_.rank >= 0) await_tables();
  }

  /// Sends everything, after `prime`. What it wrote is there when it returns; if somebody watches, it marks chunks of
  /// rows on the way.
  __device__ void run(ChunkMarker& marker, const ChunkBorders& chunks, bool watched) {
    constexpr std::int32_t kNever = 0x7FFFFFFF;
    std::int32_t border = watched ? chunks.end_block(0) * kBorderRows : kNever;
    int chunk = 0;  // of the unit before
    std::uint32_t parities = 0;
    for (int stage = 0; now_.rank >= 0;) {
      const Unit fetched = walk_.next();
      const std::int32_t fetched_token = load_token(fetched);
      wait_barrier(barriers_ + stage, parities >> stage & 1U);
      parities ^= 1U << stage;
      store_unit(now_, stage);
      close_store_group();
      if (chunk > marker.next()) {
        // All units before the last one are complete when at most this one's stores and the last one's are open.
        wait_store_groups<2>();
        __syncwarp();
        marker.report_before(chunk);
      }
      for (; now_.row >= border; border = chunks.end_block(chunk) * kBorderRows) ++chunk;
      if (now_.piece == 0) store_tables(now_, now_token_);
      fetch_tables(next_, next_token_);
      wait_store_reads<1>();
      __syncwarp();
      start_unit(ahead_, ahead_token_, stage == 0 ? kStages - 1 : stage - 1);
      now_ = next_;
      now_token_ = next_token_;
      next_ = ahead_;
      next_token_ = ahead_token_;
      ahead_ = fetched;
      ahead_token_ = fetched_token;
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    wait_store_groups<0>();
    __syncwarp();
    if (watched) marker.report_before(chunks.num_chunks());
  }

 private:
  /// Of row `lane` of the unit.
  __device__ std::int32_t load_token(const Unit& unit) const {
    if (lane_idx() >= unit.num_rows) return 0;
    return params_.sent_tokens[unit.rank * params_.num_tokens + unit.row + lane_idx()];
  }

  __device__ std::uint32_t bytes_of(const Unit& unit) const {
    const std::int64_t left = params_.row_bytes - unit.piece * walk_.shape().piece_bytes;
    return static_cast<std::uint32_t>(left < walk_.shape().piece_bytes ? left : walk_.shape().piece_bytes);
  }

  __device__ void start_unit(const Unit& unit, std::int32_t token, int stage) const {
    if (unit.rank < 0) return;
    const std::uint32_t bytes = bytes_of(unit);
    if (lane_idx() == 0) expect_loads(barriers_ + stage, bytes * static_cast<std::uint32_t>(unit.num_rows));
    __syncwarp();
    if (lane_idx() < unit.num_rows) {
      start_load(stages_ + stage * kRunStageBytes + lane_idx() * static_cast<int>(bytes),
                 params_.x + token * params_.x_stride + unit.piece * walk_.shape().piece_bytes, bytes,
                 barriers_ + stage);
    }
  }

  __device__ std::int64_t receiver_row(const Unit& unit) const { return runs_[unit.rank].first_row + unit.row; }

  __device__ void store_unit(const Unit& unit, int stage) const {
    const Receiver& receiver = receivers_[unit.rank];
    const std::uint32_t bytes = bytes_of(unit);
    const std::byte* from = stages_ + stage * kRunStageBytes + lane_idx() * static_cast<int>(bytes);
    std::byte* to = receiver.rows + (receiver_row(unit) + lane_idx()) * receiver.row_stride +
                    unit.piece * walk_.shape().piece_bytes;
    const bool side_by_side = receiver.row_stride == bytes;
    if (side_by_side && lane_idx() == 0) start_store(to, from, bytes * static_cast<std::uint32_t>(unit.num_rows));
    if (!side_by_side && lane_idx() < unit.num_rows) start_store(to, from, bytes);
  }

  /// Starts to load them. Those of the unit before have been stored.
  __device__ void fetch_tables(const Unit& unit, std::int32_t token) const {
    if (unit.rank < 0 || unit.piece != 0) return;
    const int lane = lane_idx();
    const std::int64_t entry_token = __shfl_sync(0xFFFFFFFFU, token, entry_row_ % kWarpLanes);
    if (entry_row_ < unit.num_rows) {
      const std::int64_t at = entry_token * params_.num_topk + entry_topk_;
      if (params_.record.has_ids || params_.record.has_weights)
        start_fetch<4>(tables_->homes + lane, params_.homes + at);
      if (params_.record.has_weights) start_fetch<4>(tables_->weights + lane, params_.weights + at);
    }
    if (params_.scales.element_bytes == 4) {
#pragma unroll
      for (int i = 0; i < kHeldScaleWords; ++i) {
        const std::int32_t scale_token = __shfl_sync(0xFFFFFFFFU, token, scale_rows_[i] % kWarpLanes);
        if (scale_rows_[i] >= unit.num_rows) continue;
        start_fetch<4>(tables_->scale_words[i] + lane, scale_address(scale_token, scale_columns_[i]));
      }
    }
    announce_fetches(tables_barrier_);
  }

  /// Waits for them. Each is waited for once.
  __device__ void await_tables() {
    wait_barrier(tables_barrier_, tables_parity_);
    tables_parity_ ^= 1U;
  }

  __device__ void store_tables(const Unit& unit, std::int32_t token) {
    await_tables();
    const int lane = lane_idx();
    const Receiver& receiver = receivers_[unit.rank];
    const std::int64_t first_row = receiver_row(unit);
    if (entry_row_ < unit.num_rows) {
      const std::int32_t home = tables_->homes[lane];
      const bool mine = home >= 0 && home_rank(home) == unit.rank;
      const std::int64_t row = first_row + entry_row_;
      if (params_.record.has_ids) {
        const std::int32_t id = mine ? home_expert(home) : -1;
        std::byte* ids = static_cast<std::byte*>(receiver.ids) + row * receiver.ids_stride;
        if (receiver.wide_ids) {
          reinterpret_cast<std::int64_t*>(ids)[entry_topk_] = id;
        } else {
          reinterpret_cast<std::int32_t*>(ids)[entry_topk_] = id;
        }
      }
      if (params_.record.has_weights) {
        std::byte* weights = reinterpret_cast<std::byte*>(receiver.weights) + row * receiver.weights_stride;
        reinterpret_cast<float*>(weights)[entry_topk_] = mine ? tables_->weights[lane] : 0.0F;
      }
    }
    if (num_scales_ == 0) return;
    if (params_.scales.element_bytes != 4) {
      store_byte_scales(unit, token, receiver, first_row);
      return;
    }
#pragma unroll
    for (int i = 0; i < kHeldScaleWords; ++i) {
      if (scale_rows_[i] >= unit.num_rows) continue;
      store_scale(receiver, first_row + scale_rows_[i], scale_columns_[i], tables_->scale_words[i][lane]);
    }
    for (int first = kHeldScaleWords * kWarpLanes; first < unit.num_rows * num_scales_; first += kWarpLanes) {
      const int word = first + lane_idx();
      const int row = word / num_scales_;
      const std::int32_t scale_token = __shfl_sync(0xFFFFFFFFU, token, row % kWarpLanes);
      if (row >= unit.num_rows) continue;
      const int column = word - row * num_scales_;
      store_scale(receiver, first_row + row, column, load_scale(scale_token, column));
    }
  }

  __device__ void store_byte_scales(const Unit& unit, std::int32_t token, const Receiver& receiver,
                                    std::int64_t first_row) const {
    const ScaleTable& scales = params_.scales;
    for (int row = 0; row < unit.num_rows; ++row) {
      const std::int64_t scale_token = __shfl_sync(0xFFFFFFFFU, token, row);
      for (int column = lane_idx(); column < num_scales_; column += kWarpLanes) {
        receiver.scales[(first_row + row) * receiver.scales_stride + column * receiver.scales_column_stride] =
            scales.data[scale_token * scales.row_stride + column * scales.column_stride];
      }
    }
  }

  __device__ const std::byte* scale_address(std::int64_t token, int column) const {
    const ScaleTable& scales = params_.scales;
    return scales.data + 4 * (token * scales.row_stride + column * scales.column_stride);
  }
  __device__ std::uint32_t load_scale(std::int64_t token, int column) const {
    return *reinterpret_cast<const std::uint32_t*>(scale_address(token, column));
  }
  __device__ static void store_scale(const Receiver& receiver, std::int64_t row, int column, std::uint32_t word) {
    *reinterpret_cast<std::uint32_t*>(receiver.scales + row * receiver.scales_stride +
                                      column * receiver.scales_column_stride) = word;
  }

  const DispatchParams& params_;
  const Receiver* receivers_;
  const Run* runs_;
  std::byte* stages_;        // [kStages, kRunStageBytes]
  std::uint64_t* barriers_;  // [kStages]
  FetchedTables* tables_;
  std::uint64_t* tables_barrier_;
  std::uint32_t tables_parity_ = 0;
  UnitWalk walk_;
  int entry_row_;
  int entry_topk_;
  int num_scales_;
  int scale_rows_[kHeldScaleWords] = {};
  int scale_columns_[kHeldScaleWords] = {};
  // The unit that is being sent, the two whose rows are landing, and the tokens of their rows, one a lane.
  Unit now_;
  Unit next_;
  Unit ahead_;
  std::int32_t now_token_ = 0;
  std::int32_t next_token_ = 0;
  std::int32_t ahead_token_ = 0;
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_DISPATCH_RUNS_CUH
