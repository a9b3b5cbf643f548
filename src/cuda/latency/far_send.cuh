#ifndef FERRY_CUDA_LATENCY_FAR_SEND_CUH
#define FERRY_CUDA_LATENCY_FAR_SEND_CUH

/// Part of a dispatch's send half for ranks of other nodes. Every token that has experts on a far rank gets a row in
/// the message to it, which the block stores there as it stores rows of its node; the rows of a message follow each
/// other in the order in which blocks come to them. The last block completes the messages and posts them.
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
  int sets[kMaxRanks];  ///< set in which each far rank receives this call
  int num_near;         ///< targets of the token on this node; those on far ranks follow
  // By number of the far target:
  std::byte* records[kMaxTopk];  ///< record of the token
  FarRecord starts[kMaxTopk];
};

/// Passed to DispatchSender.
template <bool kHomes>
class FarSender {
 public:
  static constexpr bool kGrantsOwed = false;  ///< another warp does (grant_far_owed_set)
  __device__ FarSender(const FarDispatchParams& params, DispatchSendShared& shared, FarTargets& targets)
      : params_(params),
        call_(params.call),
        far_(params.far),
        message_(FarMessage::of(call_.num_experts, call_.num_topk)),
        rows_at_(message_.rows_at(num_counted_tokens(params))),
        shared_(shared),
        targets_(targets) {}

  __device__ const FarLayout* layout() const { return &far_.layout; }

  /// False when the group broke. All lanes of the first warp of each block.
  __device__ bool await_sets(std::uint64_t number, const FarLook& look) const {
    return await_far_turn(call_, far_, LatencyKind::kDispatch, number, targets_.sets, look);
  }
  /// Words for await_sets(), loaded before the call's number is known.
  __device__ FarLook look() const { return {far_, LatencyKind::kDispatch}; }

  /// Writes the header and the counts of every message. All threads of the first block.
  __device__ void send_counts(int num_tokens) const {
    if (warp_idx() == 0) {
      write_far_headers(call_, far_, LatencyKind::kDispatch,
                        dispatch_header<kHomes>(params_, shared_.no_expert, num_tokens));
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

  /// Finds the far ranks that get a token, and its row in the message to each. After place_token(). All lanes of one
  /// warp.
  __device__ void place(int token, const TokenEntry& entry) const {
    const int lane = lane_idx();
    const bool is_far = entry.owner >= 0 && far_.layout.is_far(entry.owner) && targets_.sets[entry.owner] != kNoSet;
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
    __syncwarp();
    const int num_near = shared_.targets.num;
    FarRecord start{};
    if (sends) {
      start.row = static_cast<std::int32_t>(atomicAdd(&far_.state->rows[owner], 1U));
      start.first_return =
          static_cast<std::int32_t>(atomicAdd(&far_.state->returns[owner], static_cast<unsigned>(__popc(returning))));
      const int target = __popc(senders & ((1U << lane) - 1));
      std::byte* const message = message_to(owner);
      shared_.targets.rows[num_near + target] = rows_to(owner) + start.row * params_.row.stride();
      targets_.records[target] = record_of(message, token);
      targets_.starts[target] = start;
    }
    start.row = __shfl_sync(kAllLanes, start.row, leader);
    start.first_return = __shfl_sync(kAllLanes, start.first_return, leader);
    if (lane == 0) {
      targets_.num_near = num_near;
      shared_.targets.num = num_near + __popc(senders);
    }
    if (lane < call_.num_topk) {
      const std::int64_t at = std::int64_t{token} * call_.num_topk + lane;
      const int place = start.first_return + __popc(returning & ((1U << first_of_expert) - 1));
      call_.tables.rows_back.own_places[at] = is_far ? place : -1;
      call_.tables.sums_back.own_places[at] = is_far ? start.row : -1;
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
      if (rank >= 0 && !gets) reinterpret_cast<FarRecord*>(record_of(message_to(rank), token))->row = -1;
    }
  }

  /// Targets of the placed token on this node.
  __device__ int num_near() const { return targets_.num_near; }

  /// Writes the token's record to each message. All lanes of one warp.
  __device__ void write_records() const {
    const int num_topk = call_.num_topk;
    const int num_far_targets = shared_.targets.num - targets_.num_near;
#pragma unroll 1
    for (int target = 0; target < num_far_targets; ++target) {
      std::byte* const record = targets_.records[target];
      if (lane_idx() == 0) *reinterpret_cast<FarRecord*>(record) = targets_.starts[target];
      auto* const entries = reinterpret_cast<std::uint32_t*>(record + sizeof(FarRecord));
      if (lane_idx() >= num_topk) continue;
      entries[lane_idx()] = shared_.entries[lane_idx()];
      entries[num_topk + lane_idx()] = shared_.weights[lane_idx()];
    }
  }

  /// Completes the headers and posts the messages. All lanes of one warp of the last block.
  __device__ void post_all() const {
    const std::int64_t num_tokens = num_counted_tokens(params_);
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
      post(rank, idx, num_tokens, num_rows);
    }
  }

 private:
  __device__ void post(int rank, int idx, std::int64_t num_tokens, std::int64_t num_rows) const {
    const int set = targets_.sets[rank];
    if (set == kNoSet) {
      post_far(call_, far_, LatencyKind::kDispatch, idx, set, shared_.number,
               static_cast<std::int64_t>(kFarHeaderBytes), {});
      return;
    }
    const std::int64_t num_bytes =
        num_rows > 0 ? rows_at_ + num_rows * params_.row.stride() : message_.front_bytes(num_tokens);
    post_far(call_, far_, LatencyKind::kDispatch, idx, set, shared_.number, num_bytes, {});
  }

  __device__ std::byte* message_to(int rank) const { return far_.outbox + far_.message_out(far_.layout.far_idx(rank)); }
  /// First of the rows that go to a rank.
  __device__ std::byte* rows_to(int rank) const { return message_to(rank) + rows_at_; }
  __device__ std::byte* record_of(std::byte* message, int token) const {
    return message + message_.records + token * message_.record_bytes;
  }

  const FarDispatchParams& params_;
  const LatencyParams& call_;
  const FarParams& far_;
  const FarMessage message_;
  const std::int64_t rows_at_;  ///< offset of the rows in each message
  DispatchSendShared& shared_;
  FarTargets& targets_;
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_FAR_SEND_CUH
