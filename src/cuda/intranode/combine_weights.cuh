#ifndef FERRY_CUDA_INTRANODE_COMBINE_WEIGHTS_CUH
#define FERRY_CUDA_INTRANODE_COMBINE_WEIGHTS_CUH

/// Sums the weights that ranks return with their rows, for each token. The weights are fetched from peers' memory
/// together with the token's rows: a warp that loaded them into registers would wait for one link round trip per token.

#include "cuda/intranode/combine_terms.cuh"

namespace ferry::cuda::device {

/// Weights of a token that a warp can hold. With K <= 8 entries all of them fit.
inline constexpr int kFetchedWeights = 64;
static_assert(kFetchedWeights >= kWarpLanes, "the weights of a row fit, and one weight per entry");

/// Returned weights of one warp's tokens. Does nothing if the caller asked for none.
class ReturnedWeights {
 public:
  /// `fetched`: [kFetchedWeights] of shared memory. Each lane reads only what it has fetched.
  __device__ ReturnedWeights(const CombineParams& params, const Holder* holders, float* fetched)
      : params_(params), holders_(holders), fetched_(fetched) {}

  /// Starts to fetch the weights of `token`. The weights fetched before have been summed. Called after the ranks'
  /// entries have arrived, by all lanes.
  __device__ void fetch(int token, const Destination& destination) {
    if (params_.out_weights == nullptr) return;
    token_ = token;
    if (params_.one_row_per_token) {
      fetch_rows(destination);
      return;
    }
    topk_ = destination.rank >= 0 ? static_cast<int>(destination.topk) : -1;
    if (topk_ >= 0) start_fetch<sizeof(float)>(fetched_ + lane_idx(), weights_of(destination.rank) + destination.row);
  }

  /// Sums the fetched weights, if there are any; the caller has waited for them. All lanes call it.
  __device__ void sum() {
    if (token_ < 0) return;
    float* out = params_.out_weights + static_cast<std::int64_t>(token_) * params_.num_topk;
    token_ = -1;
    const bool has_entry = lane_idx() < params_.num_topk;
    if (params_.one_row_per_token) {
      add_rows();
      if (has_entry) out[lane_idx()] = sum_;
      return;
    }
    // Entries without an expert have no destination, so all entries are cleared first.
    if (has_entry) out[lane_idx()] = 0.0F;
    __syncwarp();
    if (topk_ >= 0) out[topk_] = fetched_[lane_idx()];
  }

 private:
  /// Fetches the weights of each row: entry k becomes the sum over all ranks of the weights that they returned for
  /// entry k.
  __device__ void fetch_rows(const Destination& destination) {
    sum_ = 0.0F;
    num_rows_ = 0;
    const unsigned rows = __ballot_sync(0xFFFFFFFFU, destination.rank >= 0 && (destination.flags & kFirstOfRow) != 0);
    for (unsigned left = rows; left != 0; left &= left - 1) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      const int rank = __shfl_sync(0xFFFFFFFFU, static_cast<int>(destination.rank), lane);
      const std::int64_t row = __shfl_sync(0xFFFFFFFFU, destination.row, lane);
      if ((num_rows_ + 1) * params_.num_topk > kFetchedWeights) {
        wait_fetches();
        add_rows();
      }
      if (lane_idx() < params_.num_topk) {
        start_fetch<sizeof(float)>(fetched_ + num_rows_ * params_.num_topk + lane_idx(),
                                   weights_of(rank) + row * params_.num_topk + lane_idx());
      }
      ++num_rows_;
    }
  }

  __device__ void add_rows() {
    if (lane_idx() < params_.num_topk) {
#pragma unroll 1
      for (int row = 0; row < num_rows_; ++row) {
        sum_ = __fadd_rn(sum_, fetched_[row * params_.num_topk + lane_idx()]);
      }
    }
    num_rows_ = 0;
  }

  __device__ const float* weights_of(int rank) const { return holders_[rank].weights; }

  const CombineParams& params_;
  const Holder* holders_;
  float* fetched_;
  int token_ = -1;  // token whose weights are being fetched; -1: none
  int topk_ = -1;   // this lane's entry, if each row has one weight
  int num_rows_ = 0;
  float sum_ = 0.0F;
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_COMBINE_WEIGHTS_CUH
