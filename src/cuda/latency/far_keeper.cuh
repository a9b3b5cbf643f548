#ifndef FERRY_CUDA_LATENCY_FAR_KEEPER_CUH
#define FERRY_CUDA_LATENCY_FAR_KEEPER_CUH

/// Words that receive halves keep in memory of the GPU for the calls after them.

#include <cstdint>

#include "cuda/latency/far_words.cuh"

namespace ferry::cuda::device {

/// Keeps the grants in the header of a far rank's message. All lanes of one warp.
class FarKeeper {
 public:
  __device__ FarKeeper() {}
  /// Loads what has been kept before, which takes a trip to memory: before the header has come, if possible.
  __device__ FarKeeper(const FarParams& far, int source) : source_(source) {
    if (has_grant()) kept_ = load_relaxed_system(heard(far));
  }
  /// Takes over the grants of a header that has come.
  __device__ void note(const LatencyParams& call, const LaneFarWords& header) {
    granted_ = header.own().low;
    const bool same = ReceivedHeader(header.payload(lane_idx())).agreement() == call.agreement;
    same_ = same && call.agreement != 0;
  }
  /// Keeps them. Behind all that others wait for.
  __device__ void keep(const LatencyParams& call, const FarParams& far) const {
    if (source_ < 0) return;
    if (lane_idx() == 0 && same_) forget_record(call, far, source_);
    if (has_grant()) keep_grant(heard(far), kept_, granted_);
  }

 private:
  __device__ static bool has_grant() { return lane_idx() >= kFarGrantWords && lane_idx() < kFarHeaderWords; }
  __device__ std::uint64_t* heard(const FarParams& far) const {
    const int grant = lane_idx() - kFarGrantWords;
    return heard_word(far, static_cast<LatencyKind>(grant / kGrantSlots), source_,
                      static_cast<std::uint64_t>(grant % kGrantSlots));
  }

  int source_ = -1;
  bool same_ = false;  ///< the source makes the same call
  std::uint64_t kept_ = 0;
  std::uint64_t granted_ = 0;
};

/// Keeps which messages to far ranks have left, so that the next calls need not look in memory of the host. Looks until
/// all have, or `is_over`; returns whether all have. All lanes of one warp.
template <typename IsOver>
__device__ inline bool keep_departures(const LatencyParams& call, const FarParams& far, IsOver is_over) {
  const int num_far = far.layout.num_far();
  const volatile LatencyLocal& local = local_of(call);
  bool all = true;
#pragma unroll 1
  for (int first = 0; first < kFarMessages * num_far; first += kWarpLanes) {
    const int message = (first + lane_idx()) / num_far;
    if (message >= kFarMessages) continue;
    const int rank = far.layout.far_rank((first + lane_idx()) % num_far);
    const std::uint64_t posted = message < kLatencyKinds ? local.sent[message] : far.state->weighed[rank];
    std::uint64_t left = 0;
    do {
      left = load_relaxed_system(far.left + message * far.layout.num_ranks + rank);
    } while (left < posted && !is_over());
    keep_left(far, message, rank, left);
    all = all && left >= posted;
  }
  return __all_sync(kAllLanes, static_cast<int>(all)) != 0;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_FAR_KEEPER_CUH
