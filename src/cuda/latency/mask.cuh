#ifndef FERRY_CUDA_LATENCY_MASK_CUH
#define FERRY_CUDA_LATENCY_MASK_CUH

/// Masks, the waits that set them, and the parameters of halves in groups that mask ranks: see mask.hpp.

#include <cstddef>
#include <cstdint>

#include "cuda/latency/mask.hpp"
#include "cuda/latency/turns.cuh"

namespace ferry::cuda::device {

__device__ inline LatencyMaskWords& mask_words_of(const LatencyParams& call, int rank) {
  return *reinterpret_cast<LatencyMaskWords*>(window_of(call, rank).base + call.layout.control.mask_words());
}

__device__ inline bool is_masked(const MaskParams& mask, int rank) {
  return load_relaxed_device(&mask.state->masked[rank]) != 0;
}

/// Whether `rank` masks this one.
__device__ inline bool is_masked_by(const LatencyParams& call, int rank) {
  return load_acquire_system(&mask_words_of(call, call.ranks.rank).masked_by[rank]) != 0;
}

/// Masks a rank, and notifies it. One thread.
__device__ __noinline__ inline void mask_rank(const LatencyParams& call, const MaskParams& mask, int rank) {
  if (atomicExch(&mask.state->masked[rank], 1U) != 0) return;
  store_relaxed_system(&mask_words_of(call, rank).masked_by[call.ranks.rank], 1);
}

/// Ends the mask of a rank: grants it the sets that the other ranks have been granted. One thread.
__device__ __noinline__ inline void unmask_rank(const LatencyParams& call, const MaskParams& mask, int rank) {
  atomicExch(&mask.state->masked[rank], 0U);
  const int me = call.ranks.rank;
  store_relaxed_system(&mask_words_of(call, rank).masked_by[me], 0);
  fence_system();
#pragma unroll 1
  for (int i = 0; i < kLatencyKinds * kGrantSlots; ++i) {
    const auto kind = static_cast<LatencyKind>(i / kGrantSlots);
    const auto slot = static_cast<std::uint64_t>(i % kGrantSlots);
    store_relaxed_system(grant_word(call, rank, kind, me, slot),
                         load_relaxed_system(grant_word(call, me, kind, me, slot)));
  }
}

/// Masks a rank that masks this one. Returns whether the rank is masked. One thread.
__device__ inline bool mask_if_masked_by(const LatencyParams& call, const MaskParams& mask, int rank) {
  if (rank == call.ranks.rank) return false;
  if (is_masked_by(call, rank)) mask_rank(call, mask, rank);
  return is_masked(mask, rank);
}

/// Beats per deadline.
inline constexpr std::uint64_t kBeatsPerDeadline = 16;

/// Shows the others that this rank waits, so that ranks that wait for it do not mask it. Any one thread.
__device__ __noinline__ inline void beat(const LatencyParams& call, const MaskParams& mask, std::uint64_t now) {
  auto* last = reinterpret_cast<unsigned long long*>(&mask.state->last_beat_ns);
  const unsigned long long before = *static_cast<volatile unsigned long long*>(last);
  if (now - before < mask.timeout_ns / kBeatsPerDeadline) return;
  if (atomicCAS(last, before, static_cast<unsigned long long>(now)) != before) return;
#pragma unroll 1
  for (int rank = 0; rank < call.ranks.num_ranks; ++rank) {
    if (rank == call.ranks.rank || is_masked(mask, rank)) continue;
    store_relaxed_system(&mask_words_of(call, rank).beats[call.ranks.rank], now);
  }
}

/// wait_until(), except that a peer that does not come is masked; false in that case too. One thread.
template <typename Read>
__device__ inline bool wait_or_mask(const LatencyParams& call, const MaskParams& mask, const Wait& wait, Read read,
                                    std::uint64_t expected) {
  const int peer = wait.peer;
  if (peer == call.ranks.rank) return wait_until(call.ranks, wait, read, expected);
  const std::uint64_t* const beat_word = &mask_words_of(call, call.ranks.rank).beats[peer];
  std::uint64_t deadline_ns = 0;
  std::uint64_t last_ns = 0;  // for ranks that beat
  std::uint64_t seen_beat = 0;
  bool gone = false;
  for (unsigned spin = 0;; ++spin) {
    if (read() >= expected) {
      if (call.counts_waits && spin > 0) count_step(call.ranks, peer, last_ns - kPatience * mask.timeout_ns, now_ns());
      return true;
    }
    if (gone) {  // the word has been read once more since
      mask_rank(call, mask, peer);
      return false;
    }
    if (spin % kSpinsPerCheck != 0) continue;
    if (is_broken(call.ranks) || is_masked(mask, peer)) return false;
    const std::uint64_t now = now_ns();
    const std::uint64_t its_beat = load_relaxed_system(beat_word);
    if (last_ns == 0) last_ns = now + kPatience * mask.timeout_ns;
    if (deadline_ns == 0 || its_beat != seen_beat) deadline_ns = now + mask.timeout_ns;
    seen_beat = its_beat;
    gone = now >= deadline_ns || now >= last_ns || is_masked_by(call, peer);
    if (spin == 0) continue;
    count_step(call.ranks, peer, last_ns - kPatience * mask.timeout_ns, now);
    beat(call, mask, now);
    if (spin % kSpinsPerStopCheck == 0) {
      show_wait(call.ranks, wait.awaited, peer, now);
      gone = gone || load_acquire_system(&call.ranks.report->lost_ranks.lost[peer]) != 0;
    }
  }
}

/// Waits for a word of a call. It did not come if the rank is now masked or the group broke. One thread.
__device__ inline Payload look_or_mask(const LatencyParams& call, const MaskParams& mask, const Wait& wait,
                                       const std::uint64_t* address) {
  const std::uint64_t number = wait.epoch;
  std::uint64_t word = load_acquire_system(address);
  const auto read = [&word, address, number] {
    word = load_acquire_system(address);
    return is_word_of(word, number) ? number : 0;
  };
  if (is_word_of(word, number) || wait_or_mask(call, mask, wait, read, number)) return {payload_of(word), true};
  return {};
}

/// Distance from this rank's window to `shadow`.
__device__ inline std::int64_t shadow_distance(const LatencyParams& call, const MaskParams& mask) {
  return mask.shadow - own_window(call).base;
}

/// Word in which the gate names the set where `rank` receives the call.
__device__ inline std::uint64_t* shadow_grant(const LatencyParams& call, const MaskParams& mask, LatencyKind kind,
                                              int rank, std::uint64_t number) {
  return grant_word(call, call.ranks.rank, kind, rank, number) +
         shadow_distance(call, mask) / LatencyLayout::kWordBytes;
}

/// Waits for the sets in which ranks receive call `number`, and writes them to the shadow: the gate before a send half.
/// All threads of one block.
__device__ inline void wait_for_grants(const LatencyParams& call, const MaskParams& mask, LatencyKind kind,
                                       std::uint64_t number) {
  if (is_broken(call.ranks)) return;  // the half finds that out too
#pragma unroll 1
  for (int rank = static_cast<int>(threadIdx.x); rank < call.ranks.num_ranks; rank += static_cast<int>(blockDim.x)) {
    Payload set{kNoSet, true};
    if (!mask_if_masked_by(call, mask, rank)) {
      set = look_or_mask(call, mask, {Awaited::kDone, rank, number},
                         grant_word(call, call.ranks.rank, kind, rank, number));
    }
    if (is_masked(mask, rank)) set = {kNoSet, true};
    if (set.came) post_word(shadow_grant(call, mask, kind, rank, number), number, set.value);
  }
}

/// Copies the parameters for a block to `memory`, shared memory, and sets masked ranks to `nowhere`. All threads.
template <typename Half>
__device__ inline Masked<Half>& copy_without_masked(const Masked<Half>& params, std::byte* memory) {
  static_assert(sizeof(params) % sizeof(std::uint32_t) == 0);
  auto* const to = reinterpret_cast<std::uint32_t*>(memory);
  const auto* const from = reinterpret_cast<const std::uint32_t*>(&params);
  const auto thread = static_cast<int>(threadIdx.x);
  const auto num_threads = static_cast<int>(blockDim.x);
  constexpr auto kNumWords = static_cast<int>(sizeof(params) / sizeof(std::uint32_t));
#pragma unroll 1
  for (int i = thread; i < kNumWords; i += num_threads) to[i] = from[i];
  __syncthreads();
  auto& copy = *reinterpret_cast<Masked<Half>*>(memory);
  const LatencyParams& call = params.call;
#pragma unroll 1
  for (int rank = thread; rank < call.ranks.num_ranks; rank += num_threads) {
    if (rank == call.ranks.rank) continue;
    if (!is_masked(params.mask, rank) && !is_masked_by(call, rank)) continue;
    copy.call.ranks.peer_bases[rank] = params.mask.nowhere - call.layout.offset;
  }
  __syncthreads();
  return copy;
}

/// Points a send half at the grants that its gate has written. A rank that masks this one gets nothing either, even if
/// that was found after the gate. All threads; `copy` comes from copy_without_masked().
template <typename Half>
__device__ inline void look_at_shadow_grants(const Masked<Half>& params, Masked<Half>& copy, LatencyKind kind) {
  const LatencyParams& call = params.call;
  const std::uint64_t number = turn_number(call, kind);
#pragma unroll 1
  for (int rank = static_cast<int>(threadIdx.x); rank < call.ranks.num_ranks; rank += static_cast<int>(blockDim.x)) {
    if (copy.call.ranks.peer_bases[rank] == call.ranks.peer_bases[rank]) continue;
    post_word(shadow_grant(call, params.mask, kind, rank, number), number, kNoSet);
  }
  if (threadIdx.x == 0) copy.call.layout.control.grants += shadow_distance(call, params.mask);
  __syncthreads();
}

/// Points a receive half at the words that its gate has written, until look_at_window(). All threads.
template <typename Half>
__device__ inline void look_at_shadow(const Masked<Half>& params, Masked<Half>& copy) {
  if (threadIdx.x == 0) {
    const std::int64_t distance = shadow_distance(params.call, params.mask);
    LatencyControl& control = copy.call.layout.control;
    control.headers += distance;
    control.counts += distance;
    control.done += distance;
  }
  __syncthreads();
}

template <typename Half>
__device__ inline void look_at_window(const Masked<Half>& params, Masked<Half>& copy) {
  if (threadIdx.x == 0) copy.call.layout.control = params.call.layout.control;
  __syncthreads();
}

/// Bytes of a block's copy of the parameters, at the start of its shared memory; none without masks.
template <typename Half>
FERRY_HOST_DEVICE constexpr std::size_t own_params_bytes(bool masks) {
  return masks ? round_up_part(sizeof(Masked<Half>)) : 0;
}

/// Parameters for a block's part of a send half. Without masks: those of the kernel.
template <typename Half>
__device__ inline const Half& own_send_params(const Half& params, std::byte* /*memory*/, LatencyKind /*kind*/) {
  return params;
}
/// With masks: the block's copy, in `memory`, shared. All threads.
template <typename Half>
__device__ inline Masked<Half>& own_send_params(const Masked<Half>& params, std::byte* memory, LatencyKind kind) {
  Masked<Half>& copy = copy_without_masked(params, memory);
  look_at_shadow_grants(params, copy, kind);
  return copy;
}

/// Parameters for a block's part of a receive half. With masks the half reads the shadow until look_at_window().
template <typename Half>
__device__ inline const Half& own_receive_params(const Half& params, std::byte* /*memory*/) {
  return params;
}
template <typename Half>
__device__ inline Masked<Half>& own_receive_params(const Masked<Half>& params, std::byte* memory) {
  Masked<Half>& copy = copy_without_masked(params, memory);
  look_at_shadow(params, copy);
  return copy;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_MASK_CUH
