#ifndef FERRY_CUDA_LATENCY_SMALL_NODES_SEND_CUH
#define FERRY_CUDA_LATENCY_SMALL_NODES_SEND_CUH

/// Part of a small dispatch's send half (small_send.cuh) for ranks of other nodes. The messages are those of
/// far_send.cuh with rows that are words. Each block has all entries of this rank, so it finds the places of its
/// token's rows by itself, and the first block all of a message's header.

#include "cuda/latency/far_message.hpp"
#include "cuda/latency/far_words.cuh"
#include "cuda/latency/row_words.cuh"
#include "cuda/latency/small_parts.cuh"
#include "cuda/sync/part_barrier.cuh"

namespace ferry::cuda::device {

/// State of a block besides SmallShared, in dynamic shared memory. Each [R], for far ranks.
struct SmallFarShared {
  int sets[kSmallRanks];              ///< set in which the rank receives this call
  unsigned tokens[kSmallRanks];       ///< bit t: this rank's token t has a row for the rank
  std::int32_t returns[kSmallRanks];  ///< rows that the rank returns for tokens before this block's; first block: all

  /// Memory for a row's bytes, behind this.
  __device__ std::byte* row() { return reinterpret_cast<std::byte*>(this) + round_up_part(sizeof(SmallFarShared)); }
  FERRY_HOST_DEVICE static constexpr std::size_t size_bytes(std::int64_t row_bytes) {
    return round_up_part(sizeof(SmallFarShared)) + static_cast<std::size_t>(row_bytes);
  }
};

/// Passed to SmallSender.
class SmallFarSender {
 public:
  static constexpr bool kPresent = true;
  __device__ SmallFarSender(const FarDispatchParams& params, const SmallShared& shared, SmallFarShared& far_shared)
      : params_(params),
        call_(params.call),
        far_(params.far),
        message_(FarMessage::of(call_.num_experts, call_.num_topk)),
        word_stride_(far_row_words_bytes(params.row.stride())),
        shared_(shared),
        far_shared_(far_shared) {}

  __device__ const FarLayout* layout() const { return &far_.layout; }

  /// Words for await_sets(), loaded before the call's number is known.
  __device__ FarLook look() const { return {far_, LatencyKind::kDispatch}; }
  /// False when the group broke. All lanes of the first warp of each block.
  __device__ bool await_sets(std::uint64_t number, const FarLook& look) const {
    return await_far_turn(call_, far_, LatencyKind::kDispatch, number, far_shared_.sets, look);
  }

  /// Threads 0 to kSmallRanks - 1 of some, before a barrier.
  __device__ void clear(int thread) const {
    if (thread < kSmallRanks) far_shared_.tokens[thread] = far_shared_.returns[thread] = 0;
  }
  /// Counts tokens and returns of far ranks, for the block of `token`; -1: the first block. `home`: of this thread's
  /// expert, or -1; `tokens_of_expert`: its tokens. Between barriers.
  __device__ void count(std::int32_t home, unsigned tokens_of_expert, int token) const {
    if (home < 0 || tokens_of_expert == 0 || !far_.layout.is_far(home_rank(home))) return;
    atomicOr(&far_shared_.tokens[home_rank(home)], tokens_of_expert);
    const int before = __popc(tokens_of_expert & before_token(token));
    if (before > 0) atomicAdd(&far_shared_.returns[home_rank(home)], before);
  }

  /// Writes headers, counts and posts, all but the numbers of posts. All threads of the first block. `counts`: tokens
  /// of each expert, one bit each.
  __device__ void send_first(const unsigned* counts, int num_counted) const {
    if (warp_idx() == kPostingWarp) write_headers(num_counted);
    const int num_experts = call_.num_experts;
    const auto count_of = [counts, num_experts](int expert) {
      return expert < num_experts ? static_cast<std::uint32_t>(__popc(counts[expert])) : 0;
    };
    // The last warps: the others are those that write headers.
    const auto word = kDispatchThreads - 1 - static_cast<int>(threadIdx.x);
    static_assert(kSmallExperts <= kDispatchThreads);
    if (word >= num_far_words(num_experts)) return;
#pragma unroll 1
    for (int idx = 0; idx < far_.layout.num_far(); ++idx) {
      store_far_word(header_out(far_, LatencyKind::kDispatch, idx) + message_.counts, word, shared_.number, count_of);
    }
  }

  /// Far ranks that get a token's row, one bit each. All lanes of a warp; `home` as in SmallSender::send().
  __device__ unsigned targets(std::int32_t home) const {
    const unsigned ranks = ranks_of(home);
    return ranks & __ballot_sync(kAllLanes, lane_idx() < call_.ranks.num_ranks &&
                                                far_.layout.is_far(lane_idx() % kSmallRanks) &&
                                                far_shared_.sets[lane_idx() % kSmallRanks] != kNoSet);
  }
  /// Where RowStep stores the bytes of a row that goes to far ranks, and the place of that among SmallTargets::rows,
  /// which no rank of this node has.
  __device__ std::byte* row() const { return far_shared_.row(); }
  __device__ int row_idx() const { return far_.layout.far_rank(0); }

  /// Writes a token's record to each message, and its places to the Routing. `entry`: this lane's (pack_entry).
  /// `targets`: see there. All lanes of one warp.
  __device__ void write_records(int token, std::int32_t home, std::uint32_t entry, std::uint32_t weight,
                                unsigned targets) const {
    const int lane = lane_idx();
    const int num_topk = call_.num_topk;
    const int rank = home < 0 ? -1 : home_rank(home);
    const bool is_target = rank >= 0 && (targets >> rank & 1U) != 0;
    keep_places(token, entry, is_target ? rank : -1);
    // Payloads of this lane's word, but for the first two of the record, which differ from rank to rank.
    std::uint32_t payloads[kFarWordPayloads];
#pragma unroll
    for (int i = 0; i < kFarWordPayloads; ++i) {
      const int at = lane * kFarWordPayloads + i - kFarRecordPayloads;
      const std::uint32_t own_entry = __shfl_sync(kAllLanes, entry, at % kWarpLanes);
      const std::uint32_t own_weight = __shfl_sync(kAllLanes, weight, (at - num_topk) % kWarpLanes);
      payloads[i] = at < num_topk ? own_entry : at < 2 * num_topk ? own_weight : 0;
    }
    if (lane >= num_far_words(kFarRecordPayloads + 2 * num_topk)) return;
#pragma unroll 1
    for (int idx = 0; idx < far_.layout.num_far(); ++idx) {
      const int target = far_.layout.far_rank(idx);
      if (lane == 0) {
        payloads[0] = static_cast<std::uint32_t>((targets >> target & 1U) != 0 ? row_of(target, token) : -1);
        payloads[1] = static_cast<std::uint32_t>(far_shared_.returns[target]);
      }
      std::byte* const record = header_out(far_, LatencyKind::kDispatch, idx) + message_.record(token);
      store_wide_relaxed_system(reinterpret_cast<WideWord*>(record) + lane,
                                make_far_word(shared_.number, payloads[0], payloads[1], payloads[2]));
    }
  }

  /// Stores the words of the row to each message. All warps but the first, which have stored its bytes.
  __device__ void store_row_words(int token, unsigned targets) const {
    if (targets == 0) return;
    meet_warps<kRowThreads / kWarpLanes>();
    const auto row_bytes = static_cast<int>(params_.row.stride());
    const std::int64_t first = message_.words(num_counted_tokens(params_), 1, word_stride_);
    constexpr int kStepBytes = kFarStepVectors * kLineBytes;
    constexpr int kStep = kRowThreads / kWarpLanes * kStepBytes;
#pragma unroll 1
    for (int begin = (warp_idx() - 1) * kStepBytes; begin < row_bytes; begin += kStep) {
      const int bytes = min(kStepBytes, row_bytes - begin);
#pragma unroll 1
      for (unsigned left = targets; left != 0; left &= left - 1) {
        const int rank = __ffs(static_cast<int>(left)) - 1;
        std::byte* const header = header_out(far_, LatencyKind::kDispatch, far_.layout.far_idx(rank));
        store_as_words(header + first - row_of(rank, token) * word_stride_, shared_.number, far_shared_.row(), begin,
                       bytes);
      }
    }
  }

 private:
  __device__ static unsigned before_token(int token) { return token < 0 ? ~0U : (1U << token) - 1U; }
  __device__ int row_of(int rank, int token) const { return __popc(far_shared_.tokens[rank] & before_token(token)); }

  /// Writes headers and posts. All lanes of one warp of the first block.
  __device__ void write_headers(int num_counted) const {
    write_far_headers(call_, far_, LatencyKind::kDispatch, shared_.number,
                      dispatch_header<false>(params_, {shared_.bad_entry, 0}, num_counted));
    __syncwarp();
    const int idx = lane_idx();
    if (idx >= far_.layout.num_far()) return;
    const int rank = far_.layout.far_rank(idx);
    FarFields fields{};
#pragma unroll 1
    for (int before = 0; before < idx; ++before) {
      fields.first_return += far_shared_.returns[far_.layout.far_rank(before)];
      fields.first_sum += row_of(far_.layout.far_rank(before), -1);
    }
    fields.num_rows = row_of(rank, -1);
    fields.num_returns = far_shared_.returns[rank];
    call_.tables.rows_back.own_firsts[rank] = fields.first_return;
    call_.tables.sums_back.own_firsts[rank] = fields.first_sum;
    write_far_fields(header_out(far_, LatencyKind::kDispatch, idx), shared_.number, fields);
    const int set = far_shared_.sets[rank];
    const std::int64_t begin = set == kNoSet ? 0 : message_.words(num_counted, fields.num_rows, word_stride_);
    const FarPart front = part_with_header(call_, far_, LatencyKind::kDispatch, idx, set, begin, kFarHeaderBytes);
    // The first block posts, and the last one only grants.
    const int num_blocks = static_cast<int>(gridDim.x) - 2;
    write_post(call_, far_, static_cast<int>(LatencyKind::kDispatch), rank, {front, {}, set, false, num_blocks});
  }

  /// Writes the places of what far ranks return. `rank`: that of this lane's entry, -1: none that gets a row.
  __device__ void keep_places(int token, std::uint32_t entry, int rank) const {
    const int lane = lane_idx();
    const unsigned same_rank = __match_any_sync(kAllLanes, rank);
    const unsigned same_expert = __match_any_sync(kAllLanes, rank < 0 ? ~static_cast<unsigned>(lane) : entry);
    const int first_of_expert = __ffs(static_cast<int>(same_expert)) - 1;
    const unsigned returning = __ballot_sync(kAllLanes, static_cast<int>(rank >= 0 && first_of_expert == lane));
    if (lane >= call_.num_topk) return;
    const int at = token * call_.num_topk + lane;
    const unsigned before = returning & same_rank & ((1U << first_of_expert) - 1U);
    call_.tables.rows_back.own_places[at] = rank < 0 ? -1 : far_shared_.returns[rank] + __popc(before);
    call_.tables.sums_back.own_places[at] = rank < 0 ? -1 : row_of(rank, token);
  }

  const FarDispatchParams& params_;
  const LatencyParams& call_;
  const FarParams& far_;
  const FarMessage message_;
  const std::int64_t word_stride_;
  const SmallShared& shared_;
  SmallFarShared& far_shared_;
};

/// Posts the messages, whose posts are written, or in other blocks than the first reports the block's part. The posting
/// warp, behind a barrier of the block.
__device__ inline void post_small(const FarParams& far, std::uint64_t number) {
  if (blockIdx.x != 0) {
    report_block(far, LatencyKind::kDispatch, static_cast<int>(blockIdx.x) - 1, number);
    return;
  }
  if (lane_idx() >= far.layout.num_far()) return;
  post_number(far, static_cast<int>(LatencyKind::kDispatch), far.layout.far_rank(lane_idx()), number);
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_SMALL_NODES_SEND_CUH
