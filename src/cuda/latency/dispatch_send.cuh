#ifndef FERRY_CUDA_LATENCY_DISPATCH_SEND_CUH
#define FERRY_CUDA_LATENCY_DISPATCH_SEND_CUH

/// The send half of latency_dispatch. The first block counts all tokens and tells every rank the counts; the others
/// have some of the tokens each, tell every rank where their entries go, and send their rows. In those the first warp
/// waits for the call's turn and finds out where a token goes, while the others load and quantise its row. No block
/// waits for another, nor for a peer once its set is granted.

#include "cuda/intranode/pick.cuh"
#include "cuda/latency/dispatch_threads.hpp"
#include "cuda/latency/send_rows.cuh"

namespace ferry::cuda::device {

/// What a block knows, in dynamic shared memory; the experts' counts follow.
struct DispatchSendShared {
  std::uint64_t number;
  unsigned long long bad_entry;
  int sets[kMaxRanks];
  // Of the token that is being sent.
  RowTargets targets;
  int ranks[kMaxTopk];  ///< of the targets
  std::uint32_t entries[kMaxTopk];
  std::uint32_t weights[kMaxTopk];
  std::uint32_t scale_words[kStepBlocks];

  __device__ unsigned* tokens_of_expert() { return reinterpret_cast<unsigned*>(this + 1); }  ///< [E]
  FERRY_HOST_DEVICE static constexpr std::size_t size_bytes(int num_experts) {
    return sizeof(DispatchSendShared) + static_cast<std::size_t>(num_experts) * sizeof(unsigned);
  }
};
inline constexpr unsigned long long kNoBadEntry = ~0ULL;

__device__ inline std::int64_t load_id(const DispatchSendParams& params, std::int64_t at) {
  return params.wide_ids ? static_cast<const std::int64_t*>(params.topk_idx)[at]
                         : static_cast<const std::int32_t*>(params.topk_idx)[at];
}

/// -1: none, or no expert at all.
__device__ inline int expert_of(const DispatchSendParams& params, std::int64_t token, std::int64_t id) {
  return pick_expert(params.placement, params.call.num_experts, id, token, params.call.ranks.rank);
}

/// Tokens that may have experts, from the first on.
__device__ inline int num_counted_tokens(const DispatchSendParams& params) {
  const auto num_tokens = static_cast<int>(params.call.num_tokens);  // at most kMaxLatencyTokens
  return params.num_tokens_view == nullptr ? num_tokens : max(0, min(*params.num_tokens_view, num_tokens));
}

/// What the Routing keeps of an entry, whose id stands for `expert`. By the block that counts.
__device__ inline void keep_entry(const DispatchSendParams& params, DispatchSendShared& shared, std::int64_t at,
                                  std::int64_t id, int expert) {
  const LatencyTables& tables = params.call.tables;
  if (expert < 0 && id != -1) atomicMin(&shared.bad_entry, static_cast<unsigned long long>(at));
  tables.ids[at] = expert < 0 ? id : expert;
  tables.homes[at] = expert < 0 ? -1 : home_of(params.placement.owner[expert], params.placement.local_expert[expert]);
  if (id == -1) tables.slots[at] = -1;  // the receive half does not see tokens that do not count
  if (tables.weights != nullptr) tables.weights[at] = params.weights[at];
}

/// Adds the tokens before `end` to `tokens_of_expert` [E], each once for an expert; those from `num_counted` on have
/// none. All warps but the first.
__device__ inline void count_tokens(const DispatchSendParams& params, DispatchSendShared& shared, int end,
                                    int num_counted, unsigned* tokens_of_expert) {
  const int num_topk = params.call.num_topk;
  // A token has as many lanes as K rounded up to a power of two.
  const int width = num_topk <= 1 ? 1 : 1 << (kWarpLanes - __clz(num_topk - 1));
  const int tokens_per_warp = kWarpLanes / width;
  constexpr int kWarps = kDispatchThreads / kWarpLanes - 1;
#pragma unroll 1
  for (int first = (warp_idx() - 1) * tokens_per_warp; first < end; first += kWarps * tokens_per_warp) {
    const int token = first + lane_idx() / width;
    const int topk = lane_idx() % width;
    int expert = -1;
    if (topk < num_topk && token < end) {
      const std::int64_t at = std::int64_t{token} * num_topk + topk;
      const std::int64_t id = token < num_counted ? load_id(params, at) : -1;
      expert = expert_of(params, token, id);
      if (blockIdx.x == 0) keep_entry(params, shared, at, id, expert);
    }
    constexpr int kTokenShift = 16;
    const unsigned key = expert < 0 ? 0x80000000U | static_cast<unsigned>(lane_idx())
                                    : static_cast<unsigned>(lane_idx() / width << kTokenShift | expert);
    const unsigned same = __match_any_sync(kAllLanes, key);
    if (expert >= 0 && __ffs(static_cast<int>(same)) - 1 == lane_idx()) atomicAdd(&tokens_of_expert[expert], 1U);
  }
}

/// Tells every rank that this one has come to the call, and its counts.
__device__ inline void post_counts(const DispatchSendParams& params, const DispatchSendShared& shared, int num_counted,
                                   const unsigned* tokens_of_expert) {
  const LatencyParams& call = params.call;
  const auto thread = static_cast<int>(threadIdx.x);
  if (warp_idx() == 0) {
    LatencyHeader header;
    header.agreement = call.agreement;
    header.record_number = call.record_number;
    header.num_tokens = num_counted;
    header.num_blocks = gridDim.x;
    if (shared.bad_entry != kNoBadEntry) {
      header.bad_entry = static_cast<std::int64_t>(shared.bad_entry);
      header.bad_id = load_id(params, header.bad_entry);
    }
    note_bad_homes(params.placement, header.bad_entry, header.bad_id);
    header.homes_hash = hash_of_homes(params.placement);
    post_header(call, LatencyKind::kDispatch, shared.number, header, shared.sets);
  }
#pragma unroll 1
  for (int rank = 0; rank < call.ranks.num_ranks; ++rank) {
    if (shared.sets[rank] == kNoSet) continue;
    std::uint64_t* words = count_words(call, rank, shared.sets[rank], call.ranks.rank);
#pragma unroll 1
    for (int expert = thread; expert < call.num_experts; expert += kDispatchThreads) {
      post_word(words + expert, shared.number, tokens_of_expert[expert]);
    }
  }
}

/// A token's entries, one a lane.
struct TokenEntry {
  int expert = -1;
  int owner = -1;
  std::uint32_t weight = 0;

  __device__ void load(const DispatchSendParams& params, std::int64_t token) {
    if (lane_idx() >= params.call.num_topk) return;
    const std::int64_t at = token * params.call.num_topk + lane_idx();
    expert = expert_of(params, token, load_id(params, at));
    owner = expert >= 0 ? params.placement.owner[expert] : -1;
    if (params.weights != nullptr) weight = __float_as_uint(params.weights[at]);
  }
};

/// Where the entries of a token go, and its row. `tokens_of_expert` [E] counts the tokens before it, then it too. All
/// lanes of one warp.
__device__ inline void place_token(const DispatchSendParams& params, DispatchSendShared& shared, std::int64_t token,
                                   const TokenEntry& entry, unsigned* tokens_of_expert) {
  const LatencyParams& call = params.call;
  const int lane = lane_idx();
  const int owner = entry.owner;
  const unsigned ordinal = entry.expert < 0 ? 0 : tokens_of_expert[entry.expert];
  __syncwarp();
  if (entry.expert >= 0) tokens_of_expert[entry.expert] = ordinal + 1;  // lanes of the same expert store the same
  if (lane < call.num_topk) {
    shared.entries[lane] = entry.expert < 0 ? kNoExpert : pack_entry(entry.expert, static_cast<int>(ordinal));
    shared.weights[lane] = entry.weight;
  }
  const unsigned same_rank = __match_any_sync(kAllLanes, owner);
  const bool sends = owner >= 0 && __ffs(static_cast<int>(same_rank)) - 1 == lane && shared.sets[owner] != kNoSet;
  const unsigned senders = __ballot_sync(kAllLanes, static_cast<int>(sends));
  if (sends) {
    const int target = __popc(senders & ((1U << lane) - 1));
    std::byte* const rows = window_of(call, owner).rows(call.layout, LatencyKind::kDispatch, shared.sets[owner]);
    shared.ranks[target] = owner;
    shared.targets.rows[target] = rows + call.ranks.rank * call.layout.source_bytes + token * params.row.stride();
  }
  if (lane == 0) shared.targets.num = __popc(senders);
}

__device__ inline DispatchSlot slot_at(const LatencyParams& call, const DispatchSendShared& shared, int rank) {
  return DispatchSlot::at(
      window_of(call, rank).slot(call.layout, LatencyKind::kDispatch, shared.sets[rank], call.ranks.rank),
      call.max_tokens, call.num_topk);
}

/// Tells every rank where the entries of a token go. All threads that send rows.
__device__ inline void post_entries(const DispatchSendParams& params, const DispatchSendShared& shared,
                                    std::int64_t token) {
  const LatencyParams& call = params.call;
  const int num_words = call.ranks.num_ranks * call.num_topk;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) - kWarpLanes; i < num_words; i += kRowThreads) {
    const int rank = i / call.num_topk;
    const int topk = i - rank * call.num_topk;
    if (shared.sets[rank] == kNoSet) continue;
    const DispatchSlot slot = slot_at(call, shared, rank);
    const std::int64_t at = token * call.num_topk + topk;
    post_word(slot.entries + at, shared.number, shared.entries[topk]);
    if (params.weights != nullptr) post_word(slot.weights + at, shared.number, shared.weights[topk]);
  }
}

/// The tokens that a block sends.
struct BlockTokens {
  int first = 0;
  int end = 0;

  __device__ static BlockTokens of_block(int num_tokens, int num_senders) {
    const int per_block = (num_tokens + num_senders - 1) / num_senders;
    const int first = per_block * (static_cast<int>(blockIdx.x) - 1);
    if (blockIdx.x == 0 || static_cast<int>(blockIdx.x) > num_senders || first >= num_tokens) return {};
    return {first, first + per_block < num_tokens ? first + per_block : num_tokens};
  }
};

/// Sends one token, whose first step is loaded, and loads that of the next one of this block, if there is one. All
/// threads.
template <Codec kCodec>
__device__ inline void send_token(const DispatchSendParams& params, DispatchSendShared& shared, std::int64_t token,
                                  TokenEntry& entry, RowStep<kCodec>& step, bool more) {
  const LatencyParams& call = params.call;
  const bool places = warp_idx() == 0;
  const std::byte* const row = params.x + token * params.x_stride;
  if (places) place_token(params, shared, token, entry, shared.tokens_of_expert());
#pragma unroll 1
  for (int first = 0; first == 0 || first < step.num_units(); first += kStepUnits) {
    if (first > 0) {
      __syncthreads();  // the scales of the step before are sent
      if (!places) step.load(row, first);
    }
    if (!places) step.quantize(params, first, shared.scale_words);
    __syncthreads();  // targets and scales are there
    if (places) continue;
    step.store(shared.targets, first);
    if constexpr (kCodec != Codec::kPlain) step.store_scales(params, shared.targets, first, shared.scale_words);
  }
  std::uint64_t* flag = nullptr;
  if (places) {
    // While the others store.
    if (lane_idx() < shared.targets.num) flag = slot_at(call, shared, shared.ranks[lane_idx()]).row_flags + token;
  } else {
    post_entries(params, shared, token);
    if constexpr (kCodec == Codec::kPlain) send_given_scales(params, token, shared.targets);
    if (more) step.load(row + params.x_stride, 0);
  }
  __syncthreads();
  if (!places) return;
  if (flag != nullptr) {
    fence_system();
    post_word(flag, shared.number, 0);
  }
  if (more) entry.load(params, token + 1);
  __syncwarp();  // before the next token's targets
}

/// All threads of all blocks. `shared.number` is the call's number afterwards, 0 if the group broke. All threads call
/// `on_turn` once the number is known, before rows are stored.
template <Codec kCodec, typename OnTurn>
__device__ inline void send_dispatch(const DispatchSendParams& params, DispatchSendShared& shared, OnTurn on_turn) {
  const LatencyParams& call = params.call;
  const auto thread = static_cast<int>(threadIdx.x);
  unsigned* const tokens_of_expert = shared.tokens_of_expert();
  const bool counts = blockIdx.x == 0;
  const int num_tokens = num_counted_tokens(params);
  const BlockTokens tokens = BlockTokens::of_block(num_tokens, params.num_senders);
  RowStep<kCodec> step(params);
  TokenEntry entry;
  if (tokens.first < tokens.end) {
    if (warp_idx() == 0) {
      entry.load(params, tokens.first);
    } else {
      step.load(params.x + tokens.first * params.x_stride, 0);
    }
  }
#pragma unroll 1
  for (int expert = thread; expert < call.num_experts; expert += kDispatchThreads) tokens_of_expert[expert] = 0;
  if (thread == 0) shared.bad_entry = kNoBadEntry;
  __syncthreads();
  if (warp_idx() == 0) {
    const std::uint64_t number = wait_for_turn(call, LatencyKind::kDispatch, shared.sets);
    if (lane_idx() == 0) shared.number = number;
  } else {
    count_tokens(params, shared, counts ? static_cast<int>(call.num_tokens) : tokens.first, num_tokens,
                 tokens_of_expert);
  }
  __syncthreads();
  if (shared.number == 0) return;
  on_turn();
  if (counts) {
    post_counts(params, shared, num_tokens, tokens_of_expert);
    return;
  }
#pragma unroll 1
  for (int token = tokens.first; token < tokens.end; ++token) {
    send_token(params, shared, token, entry, step, token + 1 < tokens.end);
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_DISPATCH_SEND_CUH
