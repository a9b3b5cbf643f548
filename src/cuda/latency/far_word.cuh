#ifndef FERRY_CUDA_LATENCY_FAR_WORD_CUH
#define FERRY_CUDA_LATENCY_FAR_WORD_CUH

/// Words of 16 bytes of which messages between nodes are made (cuda/far/params.hpp).

#include <cstddef>
#include <cstdint>

#include "cuda/far/params.hpp"
#include "cuda/latency/words.cuh"
#include "cuda/sync/wide_word.cuh"

namespace ferry::cuda::device {

static_assert(sizeof(WideWord) == kFarWordBytes);

__device__ inline WideWord make_far_word(std::uint64_t number, std::uint32_t first, std::uint32_t second,
                                         std::uint32_t third) {
  return {static_cast<std::uint64_t>(second) << 32 | first, make_word(number, third)};
}
__device__ inline bool is_word_of(const WideWord& word, std::uint64_t number) { return is_word_of(word.high, number); }

/// Stores word `idx` of some whose payloads are `payload_of(0)`, `payload_of(1)`, …
template <typename PayloadOf>
__device__ inline void store_far_word(std::byte* words, int idx, std::uint64_t number, PayloadOf payload_at) {
  const int first = idx * kFarWordPayloads;
  store_wide_relaxed_system(reinterpret_cast<WideWord*>(words) + idx,
                            make_far_word(number, payload_at(first), payload_at(first + 1), payload_at(first + 2)));
}

/// Some words in a warp, lane i's number i.
class LaneFarWords {
 public:
  __device__ LaneFarWords() {}
  /// The first `count` words, at most kWarpLanes.
  __device__ LaneFarWords(const std::byte* words, int count) {
    if (lane_idx() < count) word_ = load_wide_relaxed_system(reinterpret_cast<const WideWord*>(words) + lane_idx());
  }
  __device__ const WideWord& own() const { return word_; }
  /// Payload number `idx`, which each lane may choose. All lanes.
  __device__ std::uint32_t payload(int idx) const {
    const int lane = idx / kFarWordPayloads % kWarpLanes;
    const std::uint64_t low = __shfl_sync(kAllLanes, word_.low, lane);
    const std::uint32_t third = __shfl_sync(kAllLanes, payload_of(word_.high), lane);
    const int part = idx % kFarWordPayloads;
    return part == 0 ? static_cast<std::uint32_t>(low) : part == 1 ? static_cast<std::uint32_t>(low >> 32) : third;
  }

 private:
  WideWord word_{};
};

/// Waits for the first `count` words of a part of a message. False when the group broke. All lanes of one warp.
__device__ __noinline__ inline bool await_far_words(const LatencyParams& call, const Wait& wait, const std::byte* part,
                                                    int count) {
  bool came = true;
  if (lane_idx() < count) {
    const auto* const word = reinterpret_cast<const WideWord*>(part) + lane_idx();
    came = is_word_of(poll_word(call, wait.awaited, wait.peer, wait.epoch, &word->high), wait.epoch);
  }
  return __all_sync(kAllLanes, static_cast<int>(came)) != 0;
}

/// The same where `words` have been loaded before, perhaps too early; they then are those that have come.
__device__ inline bool await_part(const LatencyParams& call, const Wait& wait, const std::byte* part, int count,
                                  LaneFarWords& words) {
  int looks = call.counts_waits ? kWordLooks : 0;  // looks are not counted as waits
#pragma unroll 1
  for (;; ++looks) {
    const bool missing = lane_idx() < count && !is_word_of(words.own(), wait.epoch);
    if (__any_sync(kAllLanes, static_cast<int>(missing)) == 0) return true;
    if (looks >= kWordLooks && !await_far_words(call, wait, part, count)) return false;
    words = LaneFarWords(part, count);
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_FAR_WORD_CUH
