#ifndef FERRY_CUDA_LATENCY_FAR_SEND_CUH
#define FERRY_CUDA_LATENCY_FAR_SEND_CUH

/// The part of a dispatch's send half that goes to other nodes. Every token that has experts on a far rank gets a row
/// in the message to it, with what is known of its entries; the rows of a message follow each other in the order in
/// which blocks come to them. The last block completes the messages and posts them.
///
/// It also places what the combines will return: each distinct expert of a token returns a row, or each rank its sum,
/// in the place that the token's row has in the message. The rows of one far rank lie together in a set of returns, so
/// that each rank returns them by one put.

#include "cuda/latency/dispatch_send.cuh"
#include "cuda/latency/far_message.hpp"
#include "cuda/latency/far_words.cuh"

namespace ferry::cuda::device {

/// State of a block besides DispatchSendShared, in dynamic shared memory.
struct FarTargets {
  std::byte* records[kMaxTopk];          ///< record of the token for each target
  std::int32_t first_returns[kMaxTopk];  ///< FarRecord::first_return
};

template <Codec kCodec, bool kHomes>
class FarDispatchSender {
 public:
  __device__ FarDispatchSender(const FarDispatchParams& params, DispatchSendShared& shared, FarTargets& targets)
      : params_(params.send),
        call_(params.send.call),
        far_(params.far),
        message_(FarMessage::of(call_.num_experts, call_.max_tokens, call_.num_topk)),
        shared_(shared),
        targets_(targets),
        places_(warp_idx() == 0),
        step_(params.send) {}

  /// All threads of all blocks.
  __device__ void send_all() {
    const int num_tokens = num_counted_tokens(params_);
    const BlockTokens tokens = BlockTokens::of_block(num_tokens, params_.num_senders);
    if (!begin(num_tokens, tokens)) return;
    if (blockIdx.x == 0) send_counts(num_tokens);
#pragma unroll 1
    for (int token = tokens.first; token < tokens.end; ++token) send(token);
    if (is_last_far_block(far_) && places_) post_all();
  }

 private:
  /// Counts the tokens before this block's, and waits for the call's turn. False when the group broke.
  __device__ bool begin(int num_tokens, const BlockTokens& tokens) {
    unsigned* const tokens_of_expert = shared_.tokens_of_expert();
    const auto thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
    for (int expert = thread; expert < call_.num_experts; expert += kDispatchThreads) tokens_of_expert[expert] = 0;
    if (thread == 0) shared_.bad_entry = kNoBadEntry;
    __syncthreads();
    if (places_) {
      const std::uint64_t number = turn_number(call_, LatencyKind::kDispatch);
      if (blockIdx.x == 0) publish_grants(call_, far_);
      const bool came = await_far_turn(call_, far_, LatencyKind::kDispatch, number, shared_.sets);
      if (came && blockIdx.x == 0) hide_far_ranks(call_, far_, LatencyKind::kDispatch, number);
      if (lane_idx() == 0) shared_.number = came ? number : 0;
    } else {
      const int end = blockIdx.x == 0 ? static_cast<int>(call_.num_tokens) : tokens.first;
      count_tokens<kHomes>(params_, shared_, end, num_tokens, tokens_of_expert);
    }
    __syncthreads();
    return shared_.number != 0;
  }

  __device__ std::byte* message_to(int rank) const { return far_.outbox + far_.message_out(far_.layout.far_idx(rank)); }

  /// Writes the header and the counts of every message. All threads of one block.
  __device__ void send_counts(int num_tokens) {
    if (places_) {
      write_far_headers(far_, LatencyKind::kDispatch, dispatch_header<kHomes>(params_, shared_.bad_entry, num_tokens));
    }
    const unsigned* const tokens_of_expert = shared_.tokens_of_expert();
#pragma unroll 1
    for (auto expert = static_cast<int>(threadIdx.x); expert < call_.num_experts; expert += kDispatchThreads) {
      const unsigned count = tokens_of_expert[expert];
#pragma unroll 1
      for (int idx = 0; idx < far_.layout.num_far(); ++idx) {
        reinterpret_cast<std::uint32_t*>(far_.outbox + far_.message_out(idx) + message_.counts)[expert] = count;
      }
    }
  }

  /// Sends one token to the far ranks of its experts. All threads of a block.
  __device__ void send(int token) {
    const std::byte* const row = params_.x + token * params_.x_stride;
    if (places_) {
      TokenEntry entry;
      entry.load(params_, token);
      entry.template find_owner<kHomes>(params_, token);
      place(token, entry);
    }
#pragma unroll 1
    for (int first = 0; first == 0 || first < step_.num_units(); first += kStepUnits) {
      if (first > 0) __syncthreads();  // the scales of the step before are sent
      if (!places_) {
        step_.load(row, first);
        step_.quantize(params_, first, shared_.scale_words);
      }
      __syncthreads();  // targets and scales are complete
      if (places_) continue;
      step_.store(shared_.targets, first);
      if constexpr (kCodec != Codec::kPlain) step_.store_scales(params_, shared_.targets, first, shared_.scale_words);
    }
    if (places_) {
      write_records(token);
    } else if constexpr (kCodec == Codec::kPlain) {
      send_given_scales(params_, token, shared_.targets);
    }
    __syncthreads();  // before the next token's targets
  }

  /// Finds the far ranks that get a token, and its row in the message to each. All lanes of one warp.
  __device__ void place(int token, const TokenEntry& entry) {
    const int lane = lane_idx();
    unsigned* const tokens_of_expert = shared_.tokens_of_expert();
    const unsigned ordinal = entry.expert < 0 ? 0 : tokens_of_expert[entry.expert];
    __syncwarp();
    if (entry.expert >= 0) tokens_of_expert[entry.expert] = ordinal + 1;  // equal experts store the same value
    if (lane < call_.num_topk) {
      shared_.entries[lane] = entry.expert < 0 ? kNoExpert : pack_entry(entry.expert, static_cast<int>(ordinal));
      shared_.weights[lane] = entry.weight;
    }
    const bool is_far = entry.owner >= 0 && far_.layout.is_far(entry.owner) && shared_.sets[entry.owner] != kNoSet;
    const int owner = is_far ? entry.owner : -1;
    const unsigned same_rank = __match_any_sync(kAllLanes, owner);
    const unsigned same_expert = __match_any_sync(kAllLanes, is_far ? entry.expert : -1 - lane);
    const int first_of_expert = __ffs(static_cast<int>(same_expert)) - 1;
    // A row is returned for each of these lanes.
    const unsigned returning =
        __ballot_sync(kAllLanes, static_cast<int>(is_far && first_of_expert == lane)) & same_rank;
    const int leader = __ffs(static_cast<int>(same_rank)) - 1;
    const bool sends = is_far && leader == lane;
    const unsigned senders = __ballot_sync(kAllLanes, static_cast<int>(sends));
    std::int32_t first_return = 0;
    std::int32_t num_row = 0;
    if (sends) {
      num_row = static_cast<std::int32_t>(atomicAdd(&far_.state->rows[owner], 1U));
      first_return =
          static_cast<std::int32_t>(atomicAdd(&far_.state->returns[owner], static_cast<unsigned>(__popc(returning))));
      const int target = __popc(senders & ((1U << lane) - 1));
      std::byte* const message = message_to(owner);
      shared_.targets.rows[target] = message + far_.layout.front_bytes + num_row * params_.row.stride();
      targets_.records[target] = message + message_.records + num_row * message_.record_bytes;
      targets_.first_returns[target] = first_return;
      row_of_token(message)[token] = num_row;
    }
    if (lane == 0) shared_.targets.num = __popc(senders);
    first_return = __shfl_sync(kAllLanes, first_return, leader);
    num_row = __shfl_sync(kAllLanes, num_row, leader);
    if (lane < call_.num_topk) {
      const std::int64_t at = std::int64_t{token} * call_.num_topk + lane;
      const int place = first_return + __popc(returning & ((1U << first_of_expert) - 1));
      call_.tables.rows_back.own_places[at] = is_far ? place : -1;
      call_.tables.sums_back.own_places[at] = is_far ? num_row : -1;
    }
    // Ranks that get no row of the token.
#pragma unroll 1
    for (int first = 0; first < far_.layout.num_far(); first += kWarpLanes) {
      const int idx = first + lane;
      const int rank = idx < far_.layout.num_far() ? far_.layout.far_rank(idx) : -1;
      bool gets = false;
#pragma unroll 1
      for (unsigned left = senders; left != 0; left &= left - 1) {
        const int target = __shfl_sync(kAllLanes, owner, __ffs(static_cast<int>(left)) - 1);
        gets = gets || target == rank;
      }
      if (rank >= 0 && !gets) row_of_token(message_to(rank))[token] = -1;
    }
  }

  __device__ std::int32_t* row_of_token(std::byte* message) const {
    return reinterpret_cast<std::int32_t*>(message + message_.row_of_token);
  }

  /// Writes the token's record to each message. All lanes of one warp.
  __device__ void write_records(int token) const {
    const int num_topk = call_.num_topk;
#pragma unroll 1
    for (int target = 0; target < shared_.targets.num; ++target) {
      std::byte* const record = targets_.records[target];
      if (lane_idx() == 0) *reinterpret_cast<FarRecord*>(record) = {token, targets_.first_returns[target]};
      auto* const entries = reinterpret_cast<std::uint32_t*>(record + sizeof(FarRecord));
      if (lane_idx() >= num_topk) continue;
      entries[lane_idx()] = shared_.entries[lane_idx()];
      entries[num_topk + lane_idx()] = shared_.weights[lane_idx()];
    }
  }

  /// Completes the headers and posts the messages. All lanes of one warp of the last block.
  __device__ void post_all() const {
    std::int32_t begin = 0;
    std::int32_t begin_sums = 0;
#pragma unroll 1
    for (int first = 0; first < far_.layout.num_far(); first += kWarpLanes) {
      const int idx = first + lane_idx();
      const bool exists = idx < far_.layout.num_far();
      const int rank = exists ? far_.layout.far_rank(idx) : 0;
      // Added to by atomics of other blocks.
      const auto num_rows = static_cast<std::int32_t>(exists ? atomicExch(&far_.state->rows[rank], 0U) : 0U);
      const auto num_returns = static_cast<std::int32_t>(exists ? atomicExch(&far_.state->returns[rank], 0U) : 0U);
      std::int32_t total = 0;
      const std::int32_t first_return = begin + prefix_sum(num_returns, total);
      begin += total;
      const std::int32_t first_sum = begin_sums + prefix_sum(num_rows, total);
      begin_sums += total;
      if (!exists) continue;
      call_.tables.rows_back.own_firsts[rank] = first_return;
      call_.tables.sums_back.own_firsts[rank] = first_sum;
      FarHeader& header = header_out(far_, LatencyKind::kDispatch, idx);
      header.num_rows = num_rows;
      header.num_returns = num_returns;
      header.first_return = first_return;
      header.first_sum = first_sum;
      const int set = shared_.sets[rank];
      const bool bare = set == kNoSet;
      const FarPart rows{
          far_.outbox_of_host + static_cast<std::uint64_t>(far_.message_out(idx) + far_.layout.front_bytes),
          far_.layout.front_at(0, set, far_.layout.far_idx_at(rank, call_.ranks.rank)) + far_.layout.front_bytes,
          bare ? 0 : num_rows * params_.row.stride()};
      post_far(call_, far_, LatencyKind::kDispatch, idx, set, shared_.number,
               bare ? static_cast<std::int64_t>(kFarHeaderBytes) : message_.front_bytes(num_rows), rows);
    }
  }

  const DispatchSendParams& params_;
  const LatencyParams& call_;
  const FarParams& far_;
  const FarMessage message_;
  DispatchSendShared& shared_;
  FarTargets& targets_;
  const bool places_;  ///< this warp determines the targets of tokens, and moves no rows
  RowStep<kCodec> step_;
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_FAR_SEND_CUH
