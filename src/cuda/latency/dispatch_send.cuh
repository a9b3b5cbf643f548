#ifndef FERRY_CUDA_LATENCY_DISPATCH_SEND_CUH
#define FERRY_CUDA_LATENCY_DISPATCH_SEND_CUH

/// The send half of latency_dispatch. The first block counts all tokens and sends every rank the counts. Each other
/// block has some of the tokens: it sends every rank their entries, and their rows to the ranks that get them. Its
/// first warp waits for the call's turn and determines the targets of a token, while the other warps load and quantise
/// the row. No block waits for another block, nor for a peer once its set is granted.
///
/// `kHomes`: the call may have a placement in which experts have several homes. Other kernels hold none of that code,
/// which costs time even if it does not run (docs/experiments-latency.md).

#include "cuda/latency/dispatch_words.cuh"
#include "cuda/latency/send_rows.cuh"

namespace ferry::cuda::device {

/// State of a block, in dynamic shared memory; the counts of the experts follow.
struct DispatchSendShared {
  std::uint64_t number;
  NoExpert no_expert;  ///< only of the first block
  int sets[kMaxRanks];
  // The token being sent.
  RowTargets targets;
  int ranks[kMaxTopk];  ///< rank of each target
  std::uint32_t entries[kMaxTopk];
  std::uint32_t weights[kMaxTopk];
  std::uint32_t scale_words[kStepBlocks];

  __device__ unsigned* tokens_of_expert() { return reinterpret_cast<unsigned*>(this + 1); }  ///< [E]
  FERRY_HOST_DEVICE static constexpr std::size_t size_bytes(int num_experts) {
    return sizeof(DispatchSendShared) + static_cast<std::size_t>(num_experts) * sizeof(unsigned);
  }
};

/// Notes an entry of [T, K] whose id is not -1 and picks no expert: it is bad, or its expert has no home.
template <bool kHomes>
__device__ inline void note_no_expert(const DispatchSendParams& params, DispatchSendShared& shared, std::int64_t at,
                                      std::int64_t id) {
  if constexpr (kHomes) {
    if (is_homeless(params.placement, params.call.num_experts, id)) {
      atomicAdd(&shared.no_expert.num_homeless, 1U);
      return;
    }
  }
  atomicMin(&shared.no_expert.bad_entry, static_cast<unsigned long long>(at));
}

/// Whether this lane is the first of its warp with this expert or rank for its token, so that it counts once. `token`:
/// its number in the warp; `value` -1: none. All lanes of a warp.
__device__ inline bool is_first_of_token(int token, int value) {
  constexpr int kTokenShift = 16;
  const unsigned key =
      value < 0 ? 0x80000000U | static_cast<unsigned>(lane_idx()) : static_cast<unsigned>(token << kTokenShift | value);
  const unsigned same = __match_any_sync(kAllLanes, key);
  return value >= 0 && __ffs(static_cast<int>(same)) - 1 == lane_idx();
}

/// Counts the tokens before `end`, each once per expert; tokens from `num_counted` on have no expert. All warps but the
/// first. Far: the same type as in DispatchSender.
template <bool kHomes, typename Far>
__device__ inline void count_tokens(const DispatchSendParams& params, DispatchSendShared& shared, const Far& far,
                                    int end, int num_counted, bool some_absent) {
  unsigned* const tokens_of_expert = shared.tokens_of_expert();
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
      expert = expert_of<kHomes>(params, token, id, some_absent);
      if (blockIdx.x == 0 && expert == -1 && id != -1) note_no_expert<kHomes>(params, shared, at, id);
    }
    if (is_first_of_token(lane_idx() / width, expert)) atomicAdd(&tokens_of_expert[expert], 1U);
    if constexpr (Far::kCounts) {
      if (blockIdx.x == 0) far.count(lane_idx() / width, expert);
    }
  }
}

/// Finds the places of a token's entries and of its row. `tokens_of_expert` [E] counts the tokens before it, and then
/// this one too. All lanes of one warp.
__device__ inline void place_token(const DispatchSendParams& params, DispatchSendShared& shared, std::int64_t token,
                                   const TokenEntry& entry, unsigned* tokens_of_expert) {
  const LatencyParams& call = params.call;
  const int lane = lane_idx();
  const int owner = entry.owner;
  const unsigned ordinal = entry.expert < 0 ? 0 : tokens_of_expert[entry.expert];
  __syncwarp();
  if (entry.expert >= 0) tokens_of_expert[entry.expert] = ordinal + 1;  // lanes of the same expert store the same value
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

/// Sends every rank the entries of a token. All threads that send rows.
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
    post_token_entry(params, slot, at, shared.number, shared.entries[topk], shared.weights[topk]);
  }
}

/// Tokens that a block sends.
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

/// A send half's part for ranks of other nodes, in groups of one node: nothing. See FarSender.
struct NoFarSender {
  static constexpr bool kGrantsOwed = true;  ///< wait_for_turn() does
  static constexpr bool kCounts = false;     ///< the first block counts rows for far ranks
  __device__ const FarLayout* layout() const { return nullptr; }
  struct NoLook {};
  __device__ NoLook look() const { return {}; }
  __device__ bool await_sets(std::uint64_t /*number*/, NoLook /*look*/) const { return true; }
  __device__ void send_counts(int /*num_tokens*/) const {}
  __device__ void place(int /*token*/, const TokenEntry& /*entry*/) const {}
  __device__ int num_near() const { return kMaxTopk; }
  __device__ void write_records() const {}
  __device__ void store_row_words() const {}
};

/// One block's part of the send half. Far: NoFarSender, or FarSender in groups of several nodes.
template <Codec kCodec, bool kHomes, typename Far = NoFarSender>
class DispatchSender {
 public:
  __device__ DispatchSender(const DispatchSendParams& params, DispatchSendShared& shared, const Far& far = {})
      : params_(params), call_(params.call), shared_(shared), places_(warp_idx() == 0), far_(far), step_(params) {
    if constexpr (kHomes) num_absent_ = load_num_absent(call_);
  }

  /// See send_dispatch().
  template <typename Meanwhile, typename OnTurn>
  __device__ void send_all(Meanwhile meanwhile, OnTurn on_turn) {
    const int num_tokens = num_counted_tokens(params_);
    const BlockTokens tokens = BlockTokens::of_block(num_tokens, params_.num_senders);
    prepare(num_tokens, tokens);
    meanwhile();
    bool waits = true;  // until the call's turn
#pragma unroll 1
    for (int token = tokens.first; waits || token < tokens.end; ++token) {
      const bool sends = token < tokens.end;
#pragma unroll 1
      for (int first = 0; first == 0 || first < step_.num_units(); first += kStepUnits) {
        if (first > 0) {
          __syncthreads();  // the scales of the step before are sent
          if (!places_) step_.load(row_of(token), first);
        }
        if (!places_ && sends) step_.quantize(params_, first, shared_.scale_words);
        if (waits) {
          if (!take_turn(token)) return;
          on_turn();
          if (blockIdx.x == 0) {
            if (places_) {
              post_dispatch_header<kHomes>(params_, shared_.number, shared_.sets, shared_.no_expert, num_tokens);
            }
            const unsigned* const tokens_of_expert = shared_.tokens_of_expert();
            post_counts(call_, shared_.number, shared_.sets,
                        [tokens_of_expert](int expert) { return tokens_of_expert[expert]; });
            keep_uncounted(params_, num_tokens);
            far_.send_counts(num_tokens);
          }
          if (!sends) return;
          waits = false;
        }
        if (places_ && first == 0) {
          place_token(params_, shared_, token, entry_, shared_.tokens_of_expert());
          far_.place(token, entry_);
        }
        __syncthreads();  // targets and scales are complete
        if (places_) continue;
        step_.store(shared_.targets, first);
        if constexpr (kCodec != Codec::kPlain) {
          step_.store_scales(params_, shared_.targets, first, shared_.scale_words);
        }
      }
      announce(token, token + 1 < tokens.end);
    }
  }

 private:
  __device__ const std::byte* row_of(int token) const { return params_.x + token * params_.x_stride; }

  /// Work before the call's turn: loads the first token, and counts the tokens before it.
  __device__ void prepare(int num_tokens, const BlockTokens& tokens) {
    unsigned* const tokens_of_expert = shared_.tokens_of_expert();
    if (tokens.first < tokens.end) {
      if (places_) {
        entry_.load(params_, tokens.first);
      } else {
        step_.load(row_of(tokens.first), 0);
      }
    }
    const auto thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
    for (int expert = thread; expert < call_.num_experts; expert += kDispatchThreads) tokens_of_expert[expert] = 0;
    if (thread == 0) shared_.no_expert = NoExpert();
    if constexpr (Far::kCounts) {
      if (blockIdx.x == 0) far_.clear(thread);
    }
    __syncthreads();
    if (places_) return;
    const int end = blockIdx.x == 0 ? static_cast<int>(call_.num_tokens) : tokens.first;
    count_tokens<kHomes>(params_, shared_, far_, end, num_tokens, num_absent_ != 0);
  }

  /// False when the group broke. `token`: the block's first, if it has one.
  __device__ bool take_turn(int token) {
    if (places_) {
      if constexpr (!kHomes) num_absent_ = load_num_absent(call_);
      const auto look = far_.look();
      const auto meanwhile = [this, token] { entry_.template find_owner<kHomes>(params_, token, num_absent_ != 0); };
      std::uint64_t number =
          wait_for_turn<Far::kGrantsOwed>(call_, LatencyKind::kDispatch, shared_.sets, meanwhile, far_.layout());
      if (number != 0 && !far_.await_sets(number, look)) number = 0;
      if (lane_idx() == 0) shared_.number = number;
    }
    __syncthreads();
    return shared_.number != 0;
  }

  /// Posts the flags of a token whose row is stored, and loads the block's next token if there is one.
  __device__ void announce(int token, bool more) {
    std::uint64_t* flag = nullptr;
    if (places_) {
      // While the other warps store.
      if (lane_idx() < min(shared_.targets.num, far_.num_near())) {
        flag = slot_at(call_, shared_, shared_.ranks[lane_idx()]).row_flags + token;
      }
      far_.write_records();
    } else {
      post_entries(params_, shared_, token);
      if constexpr (kCodec == Codec::kPlain) send_given_scales(params_, token, shared_.targets);
      if (more) step_.load(row_of(token + 1), 0);
      far_.store_row_words();
    }
    __syncthreads();
    if (!places_) return;
    post_row_flag(flag, shared_.number);
    entry_.keep(call_.tables, call_.num_topk, token);
    if (more) {
      entry_.load(params_, token + 1);
      entry_.template find_owner<kHomes>(params_, token + 1, num_absent_ != 0);
    }
    __syncwarp();  // before the next token's targets
  }

  const DispatchSendParams& params_;
  const LatencyParams& call_;
  DispatchSendShared& shared_;
  const bool places_;             ///< this warp determines the targets of tokens, and moves no rows
  std::uint32_t num_absent_ = 0;  ///< of absent ranks, where it is used
  const Far far_;
  RowStep<kCodec> step_;
  TokenEntry entry_;
};

/// All threads of all blocks. Afterwards `shared.number` is the call's number, 0 if the group broke. All threads call
/// `meanwhile` while the first loads are on their way, and `on_turn` once the number is known, before rows are stored.
template <Codec kCodec, bool kHomes, typename Meanwhile, typename OnTurn>
__device__ inline void send_dispatch(const DispatchSendParams& params, DispatchSendShared& shared, Meanwhile meanwhile,
                                     OnTurn on_turn) {
  DispatchSender<kCodec, kHomes> sender(params, shared);
  sender.send_all(meanwhile, on_turn);
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_DISPATCH_SEND_CUH
