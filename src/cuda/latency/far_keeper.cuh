#ifndef FERRY_CUDA_LATENCY_FAR_KEEPER_CUH
#define FERRY_CUDA_LATENCY_FAR_KEEPER_CUH

/// Words that a receive half keeps in memory of the GPU for the calls after it.

#include <cstdint>

#include "cuda/latency/far_words.cuh"

namespace ferry::cuda::device {

/// Keeps in memory of the GPU what the next calls need: the grants in the header of a message that has come, and which
/// messages to its source have left. All lanes of one warp.
class FarKeeper {
 public:
  __device__ FarKeeper() {}
  /// Loads it, which takes a trip to memory of the host. `header`: that has come.
  __device__ FarKeeper(const LatencyParams& call, const FarParams& far, int source, const LaneFarWords& header)
      : source_(source), grant_(header.own().low) {
    const bool same = ReceivedHeader(header.payload(lane_idx())).agreement() == call.agreement;
    same_ = same && call.agreement != 0;
    const int lane = lane_idx();
    if (lane >= kFarMessages) return;
    left_ = load_relaxed_system(left_word(far));
    const volatile LatencyLocal& local = local_of(call);
    posted_ = lane < kLatencyKinds ? local.sent[lane] : far.state->weighed[source];
  }
  /// Keeps it. Behind all that others wait for.
  __device__ void keep(const LatencyParams& call, const FarParams& far) const {
    const int lane = lane_idx();
    if (source_ < 0) return;
    if (lane == 0 && same_) forget_record(call, far, source_);
    if (lane < kFarMessages) {
      // Otherwise the next call would look.
      keep_left(far, lane, source_, left_ < posted_ ? load_relaxed_system(left_word(far)) : left_);
    }
    const int grant = lane - kFarGrantWords;
    if (grant < 0 || lane >= kFarHeaderWords) return;
    keep_grant(far, static_cast<LatencyKind>(grant / kGrantSlots), source_,
               static_cast<std::uint64_t>(grant % kGrantSlots), grant_);
  }

 private:
  __device__ const std::uint64_t* left_word(const FarParams& far) const {
    return far.left + lane_idx() * far.layout.num_ranks + source_;
  }

  int source_ = -1;
  bool same_ = false;  ///< the source makes the same call
  std::uint64_t grant_ = 0;
  std::uint64_t left_ = 0;    ///< lane's message: FarParams::left
  std::uint64_t posted_ = 0;  ///< and the number of the last that was posted
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_FAR_KEEPER_CUH
