#ifndef FERRY_CUDA_LATENCY_FAR_SEND_CUH
#define FERRY_CUDA_LATENCY_FAR_SEND_CUH

/// Part of a dispatch's send half for ranks of other nodes. Every token that has experts on a far rank gets a row in
/// the message to it, which the block stores there as it stores rows of its node; the rows of a message follow each
/// other in the order in which blocks come to them. Rows that are words (kFarWordTokens) are stored as bytes in shared
/// memory first. The first block counts all rows, completes the headers and posts the messages; the others report what
/// they have stored.
///
/// It also places what the combines will return: each distinct expert of a token returns a row, or each rank its sum,
/// in the place that the token's row has in the message. The rows of one far rank lie together in a set of returns, so
/// that each rank returns them by one put.

#include "cuda/latency/dispatch_send.cuh"
#include "cuda/latency/far_message.hpp"
#include "cuda/latency/far_words.cuh"
#include "cuda/latency/row_words.cuh"
#include "cuda/sync/part_barrier.cuh"

namespace ferry::cuda::device {

/// State of a block besides DispatchSendShared, in dynamic shared memory.
struct FarTargets {
  int sets[kMaxRanks];  ///< set in which each far rank receives this call
  int num_near;         ///< targets of the token on this node; those on far ranks follow
  int num_far;
  // Totals of the call, in the first block alone: rows for each rank, and rows that it returns.
  unsigned num_rows[kMaxRanks];
  unsigned num_returns[kMaxRanks];
  // By number of the far target:
  std::byte* records[kMaxTopk];    ///< record of the token
  std::byte* row_words[kMaxTopk];  ///< its row, if rows are words
  FarRecord starts[kMaxTopk];

  /// Memory for a row's bytes, behind this.
  __device__ std::byte* row() { return reinterpret_cast<std::byte*>(this) + round_up_part(sizeof(FarTargets)); }
  FERRY_HOST_DEVICE static constexpr std::size_t size_bytes(std::int64_t row_bytes) {
    return round_up_part(sizeof(FarTargets)) + static_cast<std::size_t>(row_bytes);
  }
};

/// Passed to DispatchSender.
template <bool kHomes>
class FarSender {
 public:
  static constexpr bool kGrantsOwed = false;  ///< another warp does (grant_far_owed_set)
  static constexpr bool kCounts = true;
  __device__ FarSender(const FarDispatchParams& params, DispatchSendShared& shared, FarTargets& targets)
      : params_(params),
        call_(params.call),
        far_(params.far),
        message_(FarMessage::of(call_.num_experts, call_.num_topk)),
        word_stride_(far_word_stride(far_.layout, params.row.stride(), num_counted_tokens(params))),
        first_row_(word_stride_ != 0 ? message_.words(num_counted_tokens(params), 1, word_stride_)
                                     : FarMessage::kPlainRows),
        shared_(shared),
        targets_(targets) {}

  __device__ const FarLayout* layout() const { return &far_.layout; }

  /// False when the group broke. All lanes of the first warp of each block.
  __device__ bool await_sets(std::uint64_t number, const FarLook& look) const {
    return await_far_turn(call_, far_, LatencyKind::kDispatch, number, targets_.sets, look);
  }
  /// Words for await_sets(), loaded before the call's number is known.
  __device__ FarLook look() const { return {far_, LatencyKind::kDispatch}; }

  /// Threads 0 to kMaxRanks - 1 of the first block, before the barrier that count() follows.
  __device__ void clear(int thread) const {
    if (thread < kMaxRanks) targets_.num_rows[thread] = targets_.num_returns[thread] = 0;
  }
  /// Counts the rows of some tokens, each once for a rank. `token`: its number in the warp, whose lanes have different
  /// entries; `expert`: this lane's. All lanes of a warp of the first block.
  __device__ void count(int token, int expert) const {
    const int owner = expert < 0 ? -1 : params_.placement.owner[expert];
    const bool is_far = owner >= 0 && far_.layout.is_far(owner);
    if (is_first_of_token(token, is_far ? owner : -1)) atomicAdd(&targets_.num_rows[owner], 1U);
  }

  /// Writes the header and the counts of every message, and counts returns. All threads of the first block.
  __device__ void send_counts(int num_tokens) const {
    if (warp_idx() == 0) {
      write_far_headers(call_, far_, LatencyKind::kDispatch, shared_.number,
                        dispatch_header<kHomes>(params_, shared_.no_expert, num_tokens));
    }
    const unsigned* const tokens_of_expert = shared_.tokens_of_expert();
    const int num_experts = call_.num_experts;
#pragma unroll 1
    for (auto expert = static_cast<int>(threadIdx.x); expert < num_experts; expert += kDispatchThreads) {
      const unsigned count = tokens_of_expert[expert];
      const int owner = count == 0 ? -1 : params_.placement.owner[expert];
      if (owner >= 0 && far_.layout.is_far(owner)) atomicAdd(&targets_.num_returns[owner], count);
    }
    const auto count_of = [tokens_of_expert, num_experts](int expert) {
      return expert < num_experts ? tokens_of_expert[expert] : 0;
    };
#pragma unroll 1
    for (auto word = static_cast<int>(threadIdx.x); word < num_far_words(num_experts); word += kDispatchThreads) {
#pragma unroll 1
      for (int idx = 0; idx < far_.layout.num_far(); ++idx) {
        store_far_word(header_out(far_, LatencyKind::kDispatch, idx) + message_.counts, word, shared_.number, count_of);
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
      FarPlaces& places = far_.state->places[shared_.number % 2];
      start.row = static_cast<std::int32_t>(atomicAdd(&places.rows[owner], 1U));
      start.first_return =
          static_cast<std::int32_t>(atomicAdd(&places.returns[owner], static_cast<unsigned>(__popc(returning))));
      const int target = __popc(senders & ((1U << lane) - 1));
      std::byte* const message = message_to(owner);
      if (word_stride_ != 0) {
        targets_.row_words[target] = message + first_row_ - start.row * word_stride_;
      } else {
        shared_.targets.rows[num_near + target] = message + first_row_ + start.row * params_.row.stride();
      }
      targets_.records[target] = record_of(message, token);
      targets_.starts[target] = start;
    }
    start.row = __shfl_sync(kAllLanes, start.row, leader);
    start.first_return = __shfl_sync(kAllLanes, start.first_return, leader);
    if (lane == 0) {
      targets_.num_near = num_near;
      targets_.num_far = __popc(senders);
      shared_.targets.num = num_near + targets_.num_far;
      if (word_stride_ != 0 && senders != 0) {
        shared_.targets.rows[num_near] = targets_.row();
        shared_.targets.num = num_near + 1;
      }
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
      if (rank < 0 || gets) continue;
#pragma unroll 1
      for (int word = 0; word < num_far_words(kFarRecordPayloads + 2 * call_.num_topk); ++word) {
        store_far_word(record_of(message_to(rank), token), word, shared_.number,
                       [](int payload) { return payload == 0 ? ~std::uint32_t{0} : 0; });
      }
    }
  }

  /// Targets of the placed token on this node.
  __device__ int num_near() const { return targets_.num_near; }

  /// Writes the token's record to each message. All lanes of one warp.
  __device__ void write_records() const {
    const int num_topk = call_.num_topk;
    if (lane_idx() >= num_far_words(kFarRecordPayloads + 2 * num_topk)) return;
#pragma unroll 1
    for (int target = 0; target < targets_.num_far; ++target) {
      const FarRecord& start = targets_.starts[target];
      store_far_word(targets_.records[target], lane_idx(), shared_.number, [this, &start, num_topk](int idx) {
        if (idx < kFarRecordPayloads) return reinterpret_cast<const std::uint32_t*>(&start)[idx];
        const int entry = idx - kFarRecordPayloads;
        if (entry < num_topk) return shared_.entries[entry];
        return entry < 2 * num_topk ? shared_.weights[entry - num_topk] : 0;
      });
    }
  }

  /// Stores the words of the token's row to each message. All warps but the first, which have stored its bytes.
  __device__ void store_row_words() const {
    if (word_stride_ == 0 || targets_.num_far == 0) return;
    meet_warps<kRowThreads / kWarpLanes>();
    const auto row_bytes = static_cast<int>(params_.row.stride());
    constexpr int kStepBytes = kFarStepVectors * kLineBytes;
    constexpr int kStep = (kDispatchThreads / kWarpLanes - 1) * kStepBytes;
#pragma unroll 1
    for (int begin = (warp_idx() - 1) * kStepBytes; begin < row_bytes; begin += kStep) {
      const int bytes = min(kStepBytes, row_bytes - begin);
#pragma unroll 1
      for (int target = 0; target < targets_.num_far; ++target) {
        store_as_words(targets_.row_words[target], shared_.number, targets_.row(), begin, bytes);
      }
    }
  }

  /// Completes the headers and posts the messages. The posting warp of the first block, behind a barrier.
  __device__ void post_all() const {
    const std::int64_t num_tokens = num_counted_tokens(params_);
    std::int32_t begin = 0;
    std::int32_t begin_sums = 0;
#pragma unroll 1
    for (int first = 0; first < far_.layout.num_far(); first += kWarpLanes) {
      const int idx = first + lane_idx();
      const bool exists = idx < far_.layout.num_far();
      const int rank = exists ? far_.layout.far_rank(idx) : 0;
      const bool receives = exists && targets_.sets[rank] != kNoSet;
      const auto num_rows = static_cast<std::int32_t>(receives ? targets_.num_rows[rank] : 0U);
      const auto num_returns = static_cast<std::int32_t>(receives ? targets_.num_returns[rank] : 0U);
      std::int32_t total = 0;
      const std::int32_t first_return = begin + prefix_sum(num_returns, total);
      begin += total;
      const std::int32_t first_sum = begin_sums + prefix_sum(num_rows, total);
      begin_sums += total;
      if (!exists) continue;
      call_.tables.rows_back.own_firsts[rank] = first_return;
      call_.tables.sums_back.own_firsts[rank] = first_sum;
      write_far_fields(header_out(far_, LatencyKind::kDispatch, idx), shared_.number,
                       {num_rows, num_returns, first_return, first_sum});
      post(rank, idx, num_tokens, num_rows);
    }
  }

 private:
  __device__ void post(int rank, int idx, std::int64_t num_tokens, std::int64_t num_rows) const {
    const int set = targets_.sets[rank];
    std::int64_t begin = 0;
    std::int64_t end = kFarHeaderBytes;
    const bool receives = set != kNoSet;
    if (receives) {
      begin = message_.words(num_tokens, num_rows, word_stride_);
      if (word_stride_ == 0) end += num_rows * params_.row.stride();
    }
    const FarPart front = part_with_header(call_, far_, LatencyKind::kDispatch, idx, set, begin, end);
    post_message(call_, far_, static_cast<int>(LatencyKind::kDispatch), rank, shared_.number,
                 {front, {}, set, receives && word_stride_ == 0, static_cast<int>(gridDim.x) - 1});
  }

  __device__ std::byte* message_to(int rank) const {
    return header_out(far_, LatencyKind::kDispatch, far_.layout.far_idx(rank));
  }
  __device__ std::byte* record_of(std::byte* message, int token) const { return message + message_.record(token); }

  const FarDispatchParams& params_;
  const LatencyParams& call_;
  const FarParams& far_;
  const FarMessage message_;
  const std::int64_t word_stride_;  ///< far_word_stride()
  const std::int64_t first_row_;    ///< offset of the first row from the header
  DispatchSendShared& shared_;
  FarTargets& targets_;
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_FAR_SEND_CUH
