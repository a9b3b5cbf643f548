#ifndef FERRY_CUDA_LOCAL_GATING_RECHOOSE_CUH
#define FERRY_CUDA_LOCAL_GATING_RECHOOSE_CUH

/// Enforces a capacity when tokens that find an expert full choose again. The rule is defined token by token, but a
/// token depends on earlier tokens only through the experts that they filled, which are few. Therefore the warps of a
/// block settle a window of tokens together: assume after which token each expert is full, let all tokens choose under
/// that assumption, derive from their choices after which token each expert really is full, and repeat until both
/// agree. Every token has then chosen according to the choices of earlier tokens, so by induction over the tokens the
/// result is the defined one. The process ends because choices up to the first token after which something changed stay
/// fixed, so the next change is at a later token.

#include <climits>
#include <cstddef>
#include <cstdint>

#include "cuda/local/gating_warp.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda::device {

inline constexpr int kWindowTokens = 128;
inline constexpr int kWindowWords = kWindowTokens / 32;  ///< words that hold one bit per token
inline constexpr int kFullBefore = -1;                   ///< expert is full before the window, instead of after one of
                                                         ///< its tokens
inline constexpr int kNotFull = kWindowTokens;

/// Position of an expert in these tables: by its place within the lanes, so that the lanes of a warp read adjacent
/// words.
__device__ inline int rechoose_place(const GatingKernelParams& params, int expert) {
  return expert % params.run_length * kWarpLanes + expert / params.run_length;
}

/// Shared memory of the block.
struct RechooseMemory {
  int* room;                ///< tokens that each expert can still take from this window on
  int* full_after;          ///< token of the window with which an expert becomes full
  unsigned* takers;         ///< bits of the tokens of the window that have chosen each expert
  int* first_changed;       ///< [2], for two attempts
  unsigned* has_rechosen;   ///< one word per token
  std::int16_t* unlimited;  ///< choices before the capacity is enforced, [kWindowTokens, K]
  std::int16_t* ids;        ///< choices
  std::uint32_t* scratch;   ///< scratch memory of this warp
};

/// Size in words, without the scratch memory of the warps.
__host__ __device__ inline int rechoose_words(const GatingKernelParams& params) {
  const int num_places = params.run_length * kWarpLanes;
  return num_places * (2 + kWindowWords) + 2 + kWindowTokens + kWindowTokens * params.gating.options.num_topk;
}

__device__ inline RechooseMemory rechoose_memory(const GatingKernelParams& params, int scratch_words) {
  const int num_places = params.run_length * kWarpLanes;
  const int num_entries = kWindowTokens * params.gating.options.num_topk;
  RechooseMemory memory;
  memory.room = reinterpret_cast<int*>(dynamic_shared());
  memory.full_after = memory.room + num_places;
  memory.takers = reinterpret_cast<unsigned*>(memory.full_after + num_places);
  memory.first_changed = reinterpret_cast<int*>(memory.takers + num_places * kWindowWords);
  memory.has_rechosen = reinterpret_cast<unsigned*>(memory.first_changed + 2);
  memory.unlimited = reinterpret_cast<std::int16_t*>(memory.has_rechosen + kWindowTokens);
  memory.ids = memory.unlimited + num_entries;
  memory.scratch = reinterpret_cast<std::uint32_t*>(memory.ids + num_entries) + warp_idx() * scratch_words;
  return memory;
}

/// Lets one token of the window choose again, if a full expert affects its choice or did before. One warp calls it.
template <int kRun>
__device__ void rechoose_token(const GatingKernelParams& params, std::int64_t first_token, int token,
                               const float (&bias)[kRun], const RechooseMemory& memory) {
  const int num_topk = params.gating.options.num_topk;
  const bool has_entry = lane_idx() < num_topk;
  const int at = token * num_topk + lane_idx();
  const int unlimited = has_entry ? memory.unlimited[at] : -1;
  const bool finds_full = unlimited >= 0 && memory.full_after[rechoose_place(params, unlimited)] < token;
  const bool rechooses = __any_sync(kAllLanes, finds_full) != 0;
  if (!rechooses && memory.has_rechosen[token] == 0) return;
  const auto is_closed = [&](int i) { return rechooses && memory.full_after[i * kWarpLanes + lane_idx()] < token; };
  LaneChoice choice;
  choose<kRun>(params, first_token + token, 0, bias, memory.scratch, is_closed, choice);
  const float weight = weigh(params.gating, first_token + token, choice, params.slot_lanes);
  if (has_entry) {
    store_entry(params.gating, {first_token + token, lane_idx()}, choice.id, weight);
    memory.ids[at] = static_cast<std::int16_t>(choice.id);
  }
  __syncwarp();  // all lanes have read has_rechosen
  if (lane_idx() == 0) memory.has_rechosen[token] = rechooses ? 1 : 0;
}

/// Token after which an expert with `room` places is full.
__device__ inline int full_after(int room, const unsigned* takers) {
  if (room == 0) return kFullBefore;
  for (int word = 0; word < kWindowWords; ++word) {
    unsigned rest = takers[word];
    const int count = __popc(rest);
    if (count < room) {
      room -= count;
      continue;
    }
    for (int i = 1; i < room; ++i) rest &= rest - 1;
    return word * kWarpLanes + __ffs(static_cast<int>(rest)) - 1;
  }
  return kNotFull;
}

/// Derives from the choices when each expert is full. `first_changed`: first token after which this differs from the
/// assumption.
__device__ inline void find_full(const GatingKernelParams& params, int num_entries, const RechooseMemory& memory,
                                 int* first_changed) {
  const int thread = static_cast<int>(threadIdx.x);
  const int num_threads = static_cast<int>(blockDim.x);
  const int num_topk = params.gating.options.num_topk;
  for (int i = thread; i < num_entries; i += num_threads) {
    const int id = memory.ids[i];
    const int token = i / num_topk;
    if (id < 0) continue;
    atomicOr(&memory.takers[rechoose_place(params, id) * kWindowWords + token / kWarpLanes],
             1U << (token % kWarpLanes));
  }
  __syncthreads();
  for (int place = thread; place < params.run_length * kWarpLanes; place += num_threads) {
    const int before = memory.full_after[place];
    const int now = full_after(memory.room[place], memory.takers + place * kWindowWords);
    if (now == before) continue;
    atomicMin(first_changed, min(before, now));
    memory.full_after[place] = now;
  }
  __syncthreads();
}

/// Settles the tokens of a window.
template <int kRun>
__device__ void rechoose_window(const GatingKernelParams& params, std::int64_t first_token, int num_tokens,
                                const float (&bias)[kRun], const RechooseMemory& memory) {
  const int thread = static_cast<int>(threadIdx.x);
  const int num_threads = static_cast<int>(blockDim.x);
  const int num_places = params.run_length * kWarpLanes;
  const int num_topk = params.gating.options.num_topk;
  const int num_entries = num_tokens * num_topk;
  for (int i = thread; i < num_entries; i += num_threads) {
    const int id = load_id(params.gating, {first_token + i / num_topk, i % num_topk});
    memory.unlimited[i] = static_cast<std::int16_t>(id);
    memory.ids[i] = static_cast<std::int16_t>(id);
  }
  for (int place = thread; place < num_places; place += num_threads) {
    memory.full_after[place] = memory.room[place] == 0 ? kFullBefore : kNotFull;
  }
  for (int token = thread; token < num_tokens; token += num_threads) memory.has_rechosen[token] = 0;
  if (thread == 0) memory.first_changed[0] = kNotFull;
  __syncthreads();
  int num_settled = 0;
  for (int attempt = 0;; ++attempt) {
    for (int token = num_settled + warp_idx(); token < num_tokens; token += num_threads / kWarpLanes) {
      rechoose_token<kRun>(params, first_token, token, bias, memory);
    }
    for (int i = thread; i < num_places * kWindowWords; i += num_threads) memory.takers[i] = 0;
    __syncthreads();
    if (thread == 0) memory.first_changed[(attempt + 1) % 2] = kNotFull;
    find_full(params, num_entries, memory, &memory.first_changed[attempt % 2]);
    const int changed = memory.first_changed[attempt % 2];
    if (changed == kNotFull) break;
    num_settled = changed + 1;
  }
  for (int place = thread; place < num_places; place += num_threads) {
    for (int word = 0; word < kWindowWords; ++word) {
      memory.room[place] -= __popc(memory.takers[place * kWindowWords + word]);
    }
  }
  __syncthreads();
}

template <int kRun>
__device__ void rechoose_all(const GatingKernelParams& params, int scratch_words) {
  const RechooseMemory memory = rechoose_memory(params, scratch_words);
  const std::int64_t capacity = params.gating.options.capacity;
  for (int place = static_cast<int>(threadIdx.x); place < params.run_length * kWarpLanes;
       place += static_cast<int>(blockDim.x)) {
    memory.room[place] = static_cast<int>(min(capacity, static_cast<std::int64_t>(INT_MAX)));
  }
  float bias[kRun];
  load_bias<kRun>(params, bias);
  __syncthreads();
  const std::int64_t num_tokens = params.gating.num_tokens;
  for (std::int64_t first = 0; first < num_tokens; first += kWindowTokens) {
    const int count = static_cast<int>(min(static_cast<std::int64_t>(kWindowTokens), num_tokens - first));
    rechoose_window<kRun>(params, first, count, bias, memory);
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LOCAL_GATING_RECHOOSE_CUH
