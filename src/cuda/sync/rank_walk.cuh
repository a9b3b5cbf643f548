#ifndef FERRY_CUDA_SYNC_RANK_WALK_CUH
#define FERRY_CUDA_SYNC_RANK_WALK_CUH

/// Items dealt round the ranks: item i is number i / R of rank i % R, so that all ranks get on at the same pace. A warp
/// takes every n-th item, and divides only once.

namespace ferry::cuda::device {

class RankWalk {
 public:
  /// Items first, first + step, …
  __device__ RankWalk(int num_ranks, int first, int step)
      : num_ranks_(num_ranks),
        idx_(first / num_ranks),
        rank_(first % num_ranks),
        step_idx_(step / num_ranks),
        step_rank_(step % num_ranks) {}

  /// Which of its rank's items this is.
  __device__ int idx() const { return idx_; }
  __device__ int rank() const { return rank_; }
  __device__ void advance() {
    idx_ += step_idx_;
    rank_ += step_rank_;
    if (rank_ < num_ranks_) return;
    rank_ -= num_ranks_;
    ++idx_;
  }

 private:
  int num_ranks_;
  int idx_;
  int rank_;
  int step_idx_;
  int step_rank_;
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_RANK_WALK_CUH
