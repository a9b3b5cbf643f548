#ifndef FERRY_CUDA_LATENCY_DISPATCH_WORDS_CUH
#define FERRY_CUDA_LATENCY_DISPATCH_WORDS_CUH

/// Ids of a rank's tokens as the send half of latency_dispatch reads them, the words that it posts, and the tables that
/// it keeps. For dispatches of any size (dispatch_send.cuh, small_send.cuh).

#include <cstdint>

#include "cuda/latency/absent_ranks.cuh"
#include "cuda/latency/turns.cuh"
#include "cuda/placement/pick.cuh"

namespace ferry::cuda::device {

inline constexpr unsigned long long kNoBadEntry = ~0ULL;

__device__ inline std::int64_t load_id(const DispatchSendParams& params, std::int64_t at) {
  return params.wide_ids ? static_cast<const std::int64_t*>(params.topk_idx)[at]
                         : static_cast<const std::int32_t*>(params.topk_idx)[at];
}

/// Expert of an id; -1: none, or not an expert. With homes lost_expert() if the ranks of all its homes are absent.
/// `some_absent`: used with homes alone.
template <bool kHomes>
__device__ inline int expert_of(const DispatchSendParams& params, std::int64_t token, std::int64_t id,
                                bool some_absent) {
  if constexpr (kHomes) {
    if (some_absent) return pick_present_expert(params, token, id);
    return pick_expert(params.placement, params.call.num_experts, id, token, params.call.ranks.rank);
  }
  return id >= 0 && id < params.call.num_experts ? static_cast<int>(id) : -1;
}

/// Number of tokens, from the first on, that may have experts.
__device__ inline int num_counted_tokens(const DispatchSendParams& params) {
  const auto num_tokens = static_cast<int>(params.call.num_tokens);  // at most kMaxLatencyTokens
  return params.num_tokens_view == nullptr ? num_tokens : max(0, min(*params.num_tokens_view, num_tokens));
}

/// Ids of this rank that picked no expert.
struct NoExpert {
  unsigned long long bad_entry = kNoBadEntry;  ///< index of the first id that is no expert
  unsigned num_homeless = 0;                   ///< entries whose expert has no home
};

/// This rank's header.
template <bool kHomes>
__device__ inline LatencyHeader dispatch_header(const DispatchSendParams& params, const NoExpert& ids,
                                                int num_counted) {
  LatencyHeader header;
  header.agreement = params.call.agreement;
  header.record_number = params.call.record_number;
  header.num_tokens = num_counted;
  if constexpr (kHomes) header.bad_id = ids.num_homeless;
  if (ids.bad_entry != kNoBadEntry) {
    header.bad_entry = static_cast<std::int64_t>(ids.bad_entry);
    header.bad_id = load_id(params, header.bad_entry);
  }
  if constexpr (kHomes) {
    note_bad_homes(params.placement, header.bad_entry, header.bad_id);
    header.blocks_or_homes = hash_of_homes(params.placement);
  }
  return header;
}

/// Posts this rank's header to every rank. One warp.
template <bool kHomes>
__device__ inline void post_dispatch_header(const DispatchSendParams& params, std::uint64_t number, const int* sets,
                                            const NoExpert& ids, int num_counted) {
  post_header(params.call, LatencyKind::kDispatch, number, dispatch_header<kHomes>(params, ids, num_counted), sets);
}

/// Posts `count_of(expert)`, this rank's tokens for each expert, to every rank that receives the call. All threads of a
/// block.
template <typename CountOf>
__device__ inline void post_counts(const LatencyParams& call, std::uint64_t number, const int* sets, CountOf count_of) {
#pragma unroll 1
  for (auto expert = static_cast<int>(threadIdx.x); expert < call.num_experts; expert += kDispatchThreads) {
    const std::uint32_t count = count_of(expert);
#pragma unroll 1
    for (int rank = 0; rank < call.ranks.num_ranks; ++rank) {
      if (sets[rank] == kNoSet) continue;
      post_word(count_words(call, rank, sets[rank], call.ranks.rank) + expert, number, count);
    }
  }
}

/// Posts an entry of a token, and its weight, to the rank of `slot`. `at`: the entry's index in [T, K].
__device__ inline void post_token_entry(const DispatchSendParams& params, const DispatchSlot& slot, std::int64_t at,
                                        std::uint64_t number, std::uint32_t entry, std::uint32_t weight) {
  post_word(slot.entries + at, number, entry);
  if (params.weights != nullptr) post_word(slot.weights + at, number, weight);
}

/// Posts the flag of a row; null: none. After a barrier behind the block's stores of the row.
__device__ inline void post_row_flag(std::uint64_t* flag, std::uint64_t number) {
  if (flag == nullptr) return;
  fence_system();
  post_word(flag, number, 0);
}

/// Entries of a token, one per lane.
struct TokenEntry {
  std::int64_t id = -1;
  int expert = -1;
  int owner = -1;
  std::int32_t local_expert = 0;
  std::uint32_t weight = 0;

  __device__ void load(const DispatchSendParams& params, std::int64_t token) {
    if (lane_idx() >= params.call.num_topk) return;
    const std::int64_t at = token * params.call.num_topk + lane_idx();
    id = load_id(params, at);
    if (params.weights != nullptr) weight = __float_as_uint(params.weights[at]);
  }
  /// Expert of the loaded id, and its owner. An id of an expert without a home becomes -1.
  template <bool kHomes>
  __device__ void find_owner(const DispatchSendParams& params, std::int64_t token, bool some_absent) {
    expert = expert_of<kHomes>(params, token, id, some_absent);
    if constexpr (kHomes) {
      if (expert == -1 && is_homeless(params.placement, params.call.num_experts, id)) id = -1;
    }
    owner = expert >= 0 ? params.placement.owner[expert] : -1;
    if (expert >= 0) local_expert = params.placement.local_expert[expert];
    if (some_absent) [[unlikely]]
      drop_absent(params.call);
  }
  /// Drops a pick of an absent rank's expert; its id stays.
  __device__ void drop_absent(const LatencyParams& call) {
    if (expert < -1) {
      id = lost_expert(expert);
    } else if (expert < 0 || !is_absent(call, owner)) {
      return;
    }
    expert = owner = -1;
  }
  /// Writes the entry to the Routing's tables. No thread of this call reads them.
  __device__ void keep(const LatencyTables& tables, int num_topk, std::int64_t token) const {
    if (lane_idx() >= num_topk) return;
    const std::int64_t at = token * num_topk + lane_idx();
    tables.ids[at] = expert < 0 ? id : expert;
    tables.homes[at] = expert < 0 ? -1 : home_of(owner, local_expert);
    if (id == -1) tables.slots[at] = -1;  // the receive half skips tokens that do not count
    if (tables.weights != nullptr) tables.weights[at] = __uint_as_float(weight);
  }
};

/// Writes the Routing's tables of tokens that do not count, which no block sends. All threads of a block.
__device__ inline void keep_uncounted(const DispatchSendParams& params, int num_counted) {
  const LatencyTables& tables = params.call.tables;
  const auto num_topk = static_cast<int>(params.call.num_topk);
  const std::int64_t end = params.call.num_tokens * num_topk;
#pragma unroll 1
  for (std::int64_t at = num_counted * num_topk + static_cast<int>(threadIdx.x); at < end; at += kDispatchThreads) {
    tables.ids[at] = tables.homes[at] = tables.slots[at] = -1;
    if (tables.weights != nullptr) tables.weights[at] = params.weights[at];
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_DISPATCH_WORDS_CUH
