#ifndef FERRY_CUDA_INTRANODE_DISPATCH_RECEIVE_RUNS_CUH
#define FERRY_CUDA_INTRANODE_DISPATCH_RECEIVE_RUNS_CUH

/// Receiving when each token has one row here: the rows of a source are contiguous in staging and in the outputs, so a
/// warp copies a few rows at a time and unpacks their records together. Units land in shared memory two ahead of their
/// use.

#include "cuda/intranode/dispatch_arrivals.cuh"
#include "cuda/intranode/dispatch_units.cuh"
#include "cuda/intranode/dispatch_unpack.cuh"

namespace ferry::cuda::device {

class RunReceiver {
 public:
  /// `arrived`: rows noted by the watching warp. `runs`: the run of each source.
  __device__ RunReceiver(const DispatchParams& params, const std::uint32_t* arrived, const Run* runs,
                         const RunStages& stages, int warp, int num_warps)
      : params_(params),
        arrived_(arrived),
        runs_(runs),
        stages_(stages),
        record_bytes_(params.unpacks ? static_cast<int>(params.record.size_bytes()) : 0),
        lands_records_(record_bytes_ <= kUnitRecordBytes),
        walk_(runs, shape_of(params, stages),
              {(params.ranks.rank + 1) % params.ranks.num_ranks, num_peers(params.ranks)}, params.ranks.num_ranks, warp,
              num_warps),
        entry_row_(lane_idx() / params.num_topk),
        entry_topk_(lane_idx() - entry_row_ * params.num_topk) {}

  __device__ void run() {
    walk_.begin();
    Unit now = land(0);
    Unit next = land(1);
    for (int stage = 0; now.rank >= 0; stage = stage_after(stage)) {
      use(now, stage);
      wait_store_reads<1>();
      __syncwarp();
      now = next;
      next = land(stage_before(stage));
    }
    wait_store_groups<0>();
    __syncwarp();
  }

 private:
  __device__ static UnitShape shape_of(const DispatchParams& params, const RunStages& stages) {
    int most_rows = kWarpLanes;
    if (params.unpacks) most_rows = kUnitRecordBytes / static_cast<int>(params.record.size_bytes());
    return UnitShape::of(params.staged_rows != nullptr ? params.row_bytes : 0, params.num_topk, stages.stage_bytes,
                         most_rows < 1 ? 1 : most_rows);
  }

  __device__ std::int64_t first_row(const Unit& unit) const { return runs_[unit.rank].first_row + unit.row; }
  /// Returns 0 if rows are not staged.
  __device__ std::uint32_t bytes_of(const Unit& unit) const {
    return params_.staged_rows == nullptr ? 0 : walk_.shape().bytes_of(params_.row_bytes, unit.piece);
  }

  /// Waits for the next unit and starts to load it into a stage that is no longer in use. Returns no unit if the group
  /// broke: a load of a later unit could outlive this block.
  __device__ Unit land(int stage) {
    if (broken_) return {};
    const Unit unit = walk_.next();
    if (unit.rank < 0) return unit;
    broken_ = !await_rows(arrived_, unit.rank, unit.row + unit.num_rows);
    if (broken_) return {};
    if (lane_idx() == 0) {
      const std::int64_t row = first_row(unit);
      const std::uint32_t bytes = bytes_of(unit) * static_cast<std::uint32_t>(unit.num_rows);
      const std::uint32_t record_bytes =
          lands_records_ && unit.piece == 0 ? static_cast<std::uint32_t>(record_bytes_ * unit.num_rows) : 0;
      std::uint64_t* barrier = stages_.barriers + stage;
      expect_loads(barrier, bytes + record_bytes);
      if (bytes != 0) {
        start_load(stages_.stage(stage),
                   params_.staged_rows + row * params_.row_bytes + unit.piece * walk_.shape().piece_bytes, bytes,
                   barrier);
      }
      if (record_bytes != 0) {
        start_load(stages_.record(stage), params_.records + row * record_bytes_, record_bytes, barrier);
      }
    }
    __syncwarp();
    return unit;
  }

  __device__ void use(const Unit& unit, int stage) {
    stages_.wait(stage);
    const std::int64_t row = first_row(unit);
    if (const std::uint32_t bytes = bytes_of(unit); bytes != 0) {
      store_rows(params_.out.x + row * params_.out.x_stride + unit.piece * walk_.shape().piece_bytes,
                 params_.out.x_stride, stages_.stage(stage), bytes, unit.num_rows);
    }
    close_store_group();
    if (unit.piece != 0 || record_bytes_ == 0) return;
    const std::byte* records = lands_records_ ? stages_.record(stage) : params_.records + row * record_bytes_;
    if (entry_row_ < unit.num_rows) {
      unpack_entry(params_, record_at(records, entry_row_), row + entry_row_, entry_topk_);
    }
    if (params_.out.scales.data == nullptr) return;
    for (int i = 0; i < unit.num_rows; ++i) unpack_scales(params_.out.scales, record_at(records, i), row + i);
  }

  __device__ const std::uint32_t* record_at(const std::byte* records, int idx) const {
    return reinterpret_cast<const std::uint32_t*>(records + idx * record_bytes_);
  }

  const DispatchParams& params_;
  const std::uint32_t* arrived_;
  const Run* runs_;
  RunStages stages_;
  int record_bytes_;
  bool lands_records_;
  UnitWalk walk_;
  int entry_row_;
  int entry_topk_;
  bool broken_ = false;
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_DISPATCH_RECEIVE_RUNS_CUH
