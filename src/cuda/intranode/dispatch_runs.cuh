#ifndef FERRY_CUDA_INTRANODE_DISPATCH_RUNS_CUH
#define FERRY_CUDA_INTRANODE_DISPATCH_RUNS_CUH

/// Sending receiver by receiver, into the receiver's outputs or its staging. The rows that one rank sends to another
/// are contiguous there, in token order, and so are their scales, ids and weights, or the records that hold them. A
/// warp therefore takes a few such rows at a time and writes them as one piece of memory. If rows are long, it takes a
/// piece of one row.
///
/// Blocks that send to peers send to no other rank, so that the links limit their rate: this rank's own rows have
/// separate blocks.

#include "cuda/copy/warp_copy.cuh"
#include "cuda/intranode/dispatch_tables.cuh"
#include "cuda/intranode/dispatch_units.cuh"

namespace ferry::cuda::device {

/// Chunks of rows in which this rank reports its progress. They divide the longest run that the blocks send to a peer,
/// or to any rank, this one included, if no blocks are set aside for this rank's own rows.
__device__ inline ChunkBorders run_chunks(const DispatchParams& params, const Run* runs) {
  std::int32_t most_rows = 1;
  for (int rank = 0; rank < params.ranks.num_ranks; ++rank) {
    const bool sent = rank != params.ranks.rank || params.num_own_blocks == 0;
    if (sent && runs[rank].num_rows > most_rows) most_rows = runs[rank].num_rows;
  }
  return {(most_rows + kBorderRows - 1) / kBorderRows, params.run_chunk_blocks};
}

class RunSender {
 public:
  __device__ RunSender(const DispatchParams& params, const Receiver* receivers, const Run* runs,
                       const RunStages& stages, const RunTargets& targets, int warp, int num_warps)
      : params_(params),
        receivers_(receivers),
        runs_(runs),
        stages_(stages),
        tables_(stages.tables),
        walk_(runs, UnitShape::of(params.row_bytes, params.num_topk, stages.stage_bytes), targets,
              params.ranks.num_ranks, warp, num_warps),
        entry_row_(lane_idx() / params.num_topk),
        entry_topk_(lane_idx() - entry_row_ * params.num_topk),
        num_scales_(params.scales.num_scales) {
    if (params.scales.element_bytes != 4) return;
#pragma unroll
    for (int i = 0; i < kRunScaleWords; ++i) {
      const int word = lane_idx() + i * kWarpLanes;
      scale_rows_[i] = word / num_scales_;
      scale_columns_[i] = word - scale_rows_[i] * num_scales_;
    }
  }

  /// Starts to load the first units. Reads only this rank's inputs.
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

  /// Waits for the loads that `prime` started, when the call sends nothing.
  __device__ void drop() {
    if (now_.rank >= 0) stages_.wait(0);
    if (next_.rank >= 0) stages_.wait(1);
    // Only a row's first piece has tables.
    if (now_.rank >= 0 && now_.piece == 0) stages_.wait(kStages);
  }

  /// Sends everything, after `prime`. All writes are complete when it returns; if a receiver watches, the warp marks
  /// chunks of rows meanwhile.
  __device__ void run(ChunkMarker& marker, const ChunkBorders& chunks, bool watched) {
    constexpr std::int32_t kNever = 0x7FFFFFFF;
    std::int32_t border = watched ? chunks.end_block(0) * kBorderRows : kNever;
    int chunk = 0;  // chunk of the previous unit
    for (int stage = 0; now_.rank >= 0;) {
      const Unit fetched = walk_.next();
      const std::int32_t fetched_token = load_token(fetched);
      stages_.wait(stage);
      store_unit(now_, stage);
      close_store_group();
      if (chunk > marker.next()) {
        // All units before the last one are complete when at most the stores of this unit and the last one are open.
        wait_store_groups<2>();
        __syncwarp();
        marker.report_before(chunk);
      }
      for (; now_.row >= border; border = chunks.end_block(chunk) * kBorderRows) ++chunk;
      if (now_.piece == 0) store_tables(now_, now_token_);
      fetch_tables(next_, next_token_);
      wait_store_reads<1>();
      __syncwarp();
      start_unit(ahead_, ahead_token_, stage_before(stage));
      now_ = next_;
      now_token_ = next_token_;
      next_ = ahead_;
      next_token_ = ahead_token_;
      ahead_ = fetched;
      ahead_token_ = fetched_token;
      stage = stage_after(stage);
    }
    wait_store_groups<0>();
    __syncwarp();
    if (watched) marker.report_before(chunks.num_chunks());
  }

 private:
  /// Token of the unit's row with this lane's number.
  __device__ std::int32_t load_token(const Unit& unit) const {
    if (lane_idx() >= unit.num_rows) return 0;
    return params_.sent_tokens[unit.rank * params_.num_tokens + unit.row + lane_idx()];
  }

  __device__ std::uint32_t bytes_of(const Unit& unit) const {
    return walk_.shape().bytes_of(params_.row_bytes, unit.piece);
  }

  __device__ void start_unit(const Unit& unit, std::int32_t token, int stage) const {
    if (unit.rank < 0) return;
    const std::uint32_t bytes = bytes_of(unit);
    std::uint64_t* barrier = stages_.barriers + stage;
    if (lane_idx() == 0) expect_loads(barrier, bytes * static_cast<std::uint32_t>(unit.num_rows));
    __syncwarp();
    if (lane_idx() < unit.num_rows) {
      start_load(stages_.stage(stage) + lane_idx() * static_cast<int>(bytes),
                 params_.x + token * params_.x_stride + unit.piece * walk_.shape().piece_bytes, bytes, barrier);
    }
  }

  __device__ std::int64_t receiver_row(const Unit& unit) const { return runs_[unit.rank].first_row + unit.row; }

  __device__ void store_unit(const Unit& unit, int stage) const {
    const Receiver& receiver = receivers_[unit.rank];
    store_rows(receiver.rows + receiver_row(unit) * receiver.row_stride + unit.piece * walk_.shape().piece_bytes,
               receiver.row_stride, stages_.stage(stage), bytes_of(unit), unit.num_rows);
  }

  /// Starts to load the tables of a unit. Those of the previous unit have been stored.
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
      for (int i = 0; i < kRunScaleWords; ++i) {
        const std::int32_t scale_token = __shfl_sync(0xFFFFFFFFU, token, scale_rows_[i] % kWarpLanes);
        if (scale_rows_[i] >= unit.num_rows) continue;
        start_fetch<4>(tables_->scale_words[i] + lane, scale_address(scale_token, scale_columns_[i]));
      }
    }
    announce_fetches(stages_.tables_barrier());
  }

  __device__ void store_tables(const Unit& unit, std::int32_t token) {
    stages_.wait(kStages);
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
    for (int i = 0; i < kRunScaleWords; ++i) {
      if (scale_rows_[i] >= unit.num_rows) continue;
      store_scale(receiver, first_row + scale_rows_[i], scale_columns_[i], tables_->scale_words[i][lane]);
    }
    for (int first = kRunScaleWords * kWarpLanes; first < unit.num_rows * num_scales_; first += kWarpLanes) {
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
  RunStages stages_;
  FetchedTables* tables_;
  UnitWalk walk_;
  int entry_row_;
  int entry_topk_;
  int num_scales_;
  int scale_rows_[kRunScaleWords] = {};
  int scale_columns_[kRunScaleWords] = {};
  // The unit being sent, the two whose rows are landing, and the tokens of their rows, one per lane.
  Unit now_;
  Unit next_;
  Unit ahead_;
  std::int32_t now_token_ = 0;
  std::int32_t next_token_ = 0;
  std::int32_t ahead_token_ = 0;
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_DISPATCH_RUNS_CUH
