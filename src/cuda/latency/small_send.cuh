#ifndef FERRY_CUDA_LATENCY_SMALL_SEND_CUH
#define FERRY_CUDA_LATENCY_SMALL_SEND_CUH

/// The send half of a small dispatch: the first block counts, each other block sends one token if there are enough.

#include "cuda/latency/dispatch_words.cuh"
#include "cuda/latency/small_parts.cuh"
#include "cuda/sync/part_barrier.cuh"

namespace ferry::cuda::device {

/// Places of a row: one bit for each rank that gets it.
struct SmallTargets {
  unsigned ranks = 0;
  std::byte* const* rows = nullptr;  ///< [R] in shared memory
  std::int64_t row_offset = 0;
};

template <typename Word>
__device__ inline void store_to_all(const SmallTargets& targets, std::int64_t offset, const Word& word) {
#pragma unroll 1
  for (unsigned left = targets.ranks; left != 0; left &= left - 1) {
    std::byte* const row = targets.rows[__ffs(static_cast<int>(left)) - 1];
    *reinterpret_cast<Word*>(row + targets.row_offset + offset) = word;
  }
}

/// A send half's part for ranks of other nodes, in groups of one node: nothing. See SmallFarSender.
struct NoSmallFarSender {
  static constexpr bool kPresent = false;
};

/// `kHalf`: the kernel makes a send half alone. Far: NoSmallFarSender, or SmallFarSender in groups of several nodes.
template <Codec kCodec, bool kHalf = false, typename Far = NoSmallFarSender>
class SmallSender {
 public:
  /// `memory`: the receive half's.
  __device__ SmallSender(const DispatchSendParams& params, SmallShared& shared, const ReceiveMemory& memory,
                         const Far& far = {})
      : params_(params),
        call_(params.call),
        shared_(shared),
        memory_(memory),
        far_(far),
        token_(static_cast<int>(blockIdx.x) - 1),
        step_(params) {}

  /// Prepares the row and waits for the call's turn; false when the group broke. All threads. The first warp waits for
  /// the turn, the others for their loads and counts; neither waits for the other before both are done.
  __device__ bool begin() {
    load_homes();
    num_counted_ = num_counted_tokens(params_);
    if (warp_idx() == 0) {
      if (has_row()) entry_.load(params_, token_);
      take_turn();
      keep_home();
    } else {
      prepare_row();
    }
    __syncthreads();
    if constexpr (Far::kPresent) {
      const auto expert = static_cast<int>(threadIdx.x);
      if (expert < call_.num_experts) {
        far_.count(memory_.experts.homes[expert], shared_.tokens_of_expert()[expert], token_);
      }
      __syncthreads();
    }
    return shared_.number != 0;
  }

  /// Call after begin(). All threads.
  __device__ void send() {
    if (blockIdx.x == 0) {
      if (warp_idx() == 0) {
        post_dispatch_header<false>(params_, shared_.number, shared_.sets, {shared_.bad_entry, 0}, num_counted_);
      }
      const unsigned* const tokens_of_expert = shared_.tokens_of_expert();
      post_counts(call_, shared_.number, shared_.sets, [tokens_of_expert](int expert) {
        return static_cast<std::uint32_t>(__popc(tokens_of_expert[expert]));
      });
      keep_uncounted(params_, num_counted_);
      if constexpr (Far::kPresent) far_.send_first(tokens_of_expert, num_counted_);
      return;
    }
    if (!has_row() || token_ >= num_counted_) return;
    const int lane = lane_idx();
    std::int32_t home = -1;
    int expert = -1;
    if (lane < call_.num_topk) expert = shared_.experts[token_ * call_.num_topk + lane];
    if (num_absent_ != 0 && expert >= 0 && is_absent(call_, home_rank(memory_.experts.homes[expert]))) [[unlikely]] {
      expert = -1;
    }
    std::uint32_t payload = kNoExpert;
    if (warp_idx() == 0) {
      payload = entry_of(expert);
      post_small_entries(payload);
    }
    if (expert >= 0) home = memory_.experts.homes[expert];
    SmallTargets targets;
    targets.ranks = ranks_of(home) & __ballot_sync(kAllLanes, lane < call_.ranks.num_ranks &&
                                                                  shared_.sets[lane % kSmallRanks] != kNoSet);
    targets.rows = shared_.rows;
    targets.row_offset = token_ * params_.row.stride();
    std::uint64_t* flag = nullptr;
    if (warp_idx() == 0) {
      if ((targets.ranks >> lane & 1U) != 0) flag = slot_at(lane).row_flags + token_;
    }
    unsigned far_targets = 0;
    if constexpr (Far::kPresent) {
      far_targets = far_.targets(home);
      if (far_targets != 0) targets.ranks |= 1U << far_.row_idx();
    }
    if (warp_idx() == 0) {
      if constexpr (Far::kPresent) far_.write_records(token_, home, payload, entry_.weight, far_targets);
    } else {
      step_.store(targets, 0);
      if constexpr (kCodec == Codec::kPlain) {
        send_given_scales(params_, token_, targets);
      } else {
        step_.store_scales(params_, targets, 0, shared_.scale_words);
      }
      if constexpr (Far::kPresent) far_.store_row_words(token_, far_targets);
    }
    __syncthreads();
    if (warp_idx() != 0) return;
    post_row_flag(flag, shared_.number);
    entry_.expert = expert;
    if (expert >= 0) {
      entry_.owner = home_rank(home);
      entry_.local_expert = home_expert(home);
    }
    entry_.keep(call_.tables, call_.num_topk, token_);
  }

 private:
  __device__ bool has_row() const { return token_ >= 0 && token_ < static_cast<int>(call_.num_tokens); }
  __device__ DispatchSlot slot_at(int rank) const {
    return DispatchSlot::at(reinterpret_cast<std::uint64_t*>(shared_.words[rank]), call_.max_tokens, call_.num_topk);
  }

  /// Loads the home of this thread's expert, for keep_home().
  __device__ void load_homes() {
    const auto thread = static_cast<int>(threadIdx.x);
    if (thread >= call_.num_experts) return;
    owner_ = params_.placement.owner[thread];
    local_expert_ = params_.placement.local_expert[thread];
  }
  __device__ void keep_home() const {
    const auto thread = static_cast<int>(threadIdx.x);
    if (thread < call_.num_experts) memory_.experts.homes[thread] = home_of(owner_, local_expert_);
  }

  /// Loads and quantises the block's row, and finds the tokens of each expert. All warps but the first.
  __device__ void prepare_row() {
    const int thread = static_cast<int>(threadIdx.x) - kWarpLanes;
    unsigned* const tokens_of_expert = shared_.tokens_of_expert();
    const bool counts = blockIdx.x == 0;
    const bool has_entry = (counts || has_row()) && thread < static_cast<int>(call_.num_tokens) * call_.num_topk;
    if (has_row()) step_.load(params_.x + token_ * params_.x_stride, 0);
    const std::int64_t id = has_entry ? load_id(params_, thread) : -1;
#pragma unroll 1
    for (int expert = thread; expert < call_.num_experts; expert += kRowThreads) tokens_of_expert[expert] = 0;
    if (thread < call_.ranks.num_ranks) memory_.shared->from_rank[thread] = memory_.shared->to_rank[thread] = 0;
    if constexpr (Far::kPresent) far_.clear(thread);
    if (thread == 0) {
      shared_.bad_entry = kNoBadEntry;
      shared_.other_call = 0;
      memory_.shared->first_bad_rank = kNone;
      memory_.shared->first_full_expert = kNone;
    }
    meet_warps<kRowThreads / kWarpLanes>();  // no thread has waited for a load yet
    keep_home();
    if (has_entry) {
      const int token = thread / call_.num_topk;
      int expert = -1;
      if (token < num_counted_ && id != -1) {
        expert = expert_of<false>(params_, token, id, false);
        if (expert >= 0) {
          atomicOr(&tokens_of_expert[expert], 1U << token);
        } else if (counts) {
          atomicMin(&shared_.bad_entry, static_cast<unsigned long long>(thread));
        }
      }
      shared_.experts[thread] = expert;
    }
    if (has_row()) step_.quantize(params_, 0, shared_.scale_words);
  }

  /// Waits for the call's number, and finds this rank's places on the others. The first warp.
  __device__ void take_turn() {
    num_absent_ = load_num_absent(call_);
    std::uint64_t number = 0;
    if constexpr (Far::kPresent) {
      const auto look = far_.look();
      number = wait_for_turn<false>(
          call_, LatencyKind::kDispatch, shared_.sets, [] {}, far_.layout());
      if (number != 0 && !far_.await_sets(number, look)) number = 0;
    } else {
      number = wait_for_turn<kHalf>(call_, LatencyKind::kDispatch, shared_.sets, [] {});
    }
    const int lane = lane_idx();
    if (lane < call_.ranks.num_ranks) {
      std::byte* const words = reinterpret_cast<std::byte*>(
          window_of(call_, lane).slot(call_.layout, LatencyKind::kDispatch, shared_.sets[lane], call_.ranks.rank));
      shared_.words[lane] = words;
      // The slots of all ranks precede the rows of all ranks.
      shared_.rows[lane] = words + call_.layout.words_bytes - call_.ranks.rank * call_.layout.slot_bytes +
                           call_.ranks.rank * call_.layout.source_bytes;
    }
    if constexpr (Far::kPresent) {
      if (lane == far_.row_idx()) shared_.rows[lane] = far_.row() - token_ * params_.row.stride();
    }
    if (lane == 0) shared_.number = number;
  }

  /// This lane's entry of the token, as peers receive it. `expert`: -1: none.
  __device__ std::uint32_t entry_of(int expert) const {
    if (expert < 0) return kNoExpert;
    return pack_entry(expert, __popc(shared_.tokens_of_expert()[expert] & ((1U << token_) - 1U)));
  }

  /// Sends every rank the entries of the token. The first warp.
  __device__ void post_small_entries(std::uint32_t payload) {
    const int lane = lane_idx();
    if (lane >= call_.num_topk) return;
    const int at = token_ * call_.num_topk + lane;
#pragma unroll 1
    for (int rank = 0; rank < call_.ranks.num_ranks; ++rank) {
      if (shared_.sets[rank] == kNoSet) continue;
      post_token_entry(params_, slot_at(rank), at, shared_.number, payload, entry_.weight);
    }
  }

  const DispatchSendParams& params_;
  const LatencyParams& call_;
  SmallShared& shared_;
  const ReceiveMemory& memory_;
  const Far far_;
  const int token_;
  std::uint32_t num_absent_ = 0;  ///< of absent ranks, in the first warp
  int num_counted_ = 0;
  std::int32_t owner_ = 0;
  std::int32_t local_expert_ = 0;
  RowStep<kCodec> step_;
  TokenEntry entry_;  ///< of the first warp
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_SMALL_SEND_CUH
