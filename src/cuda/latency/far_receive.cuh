#ifndef FERRY_CUDA_LATENCY_FAR_RECEIVE_CUH
#define FERRY_CUDA_LATENCY_FAR_RECEIVE_CUH

/// Part of a dispatch's receive half for ranks of other nodes: some of its blocks, the *importers*, write the words of
/// their messages into this rank's window, where the blocks that copy rows wait for them. The rows stay in the inbox;
/// the flag of a token's row says which one it is.

#include "cuda/latency/dispatch_receive.cuh"
#include "cuda/latency/far_message.hpp"
#include "cuda/latency/far_words.cuh"
#include "ferry/routing.hpp"

namespace ferry::cuda::device {

/// State of an importer, in dynamic shared memory.
struct FarImportShared {
  std::int32_t tokens[kMaxRanks];    ///< by number of the far rank: its T; -1: it makes another call
  std::int32_t num_rows[kMaxRanks];  ///< FarHeader
  std::int32_t num_returns[kMaxRanks];
};

/// The first `count` words of a part of a message in a warp: a token's record, or some counts. A word in each lane, and
/// more where there are more than a line has.
class PartWords {
 public:
  __device__ PartWords() {}
  __device__ PartWords(const std::byte* part, int count) {
    const auto* const from = reinterpret_cast<const std::uint32_t*>(part);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int at = i * kWarpLanes + lane_idx();
      words_[i] = at < count ? from[at] : 0;
    }
  }
  /// This lane's of the first line.
  __device__ std::uint32_t own() const { return words_[0]; }
  /// Word number `idx`, which each lane may choose. All lanes.
  __device__ std::uint32_t of(int idx) const {
    std::uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const std::uint32_t one = __shfl_sync(kAllLanes, words_[i], idx % kWarpLanes);
      if (idx / kWarpLanes == i) word = one;
    }
    return word;
  }

 private:
  static constexpr int kMostWords = static_cast<int>(sizeof(FarRecord) / sizeof(std::uint32_t)) + 2 * kMaxTopk;
  static constexpr int kLoads = (kMostWords + kWarpLanes - 1) / kWarpLanes;
  std::uint32_t words_[kLoads] = {};
};

/// Importers are the blocks before the first that copies rows, but for the one that reports if there are others.
__device__ inline int first_importer(const DispatchReceiveRows& params) { return params.first_receiver > 1 ? 1 : 0; }
__device__ inline bool is_importer(const DispatchReceiveRows& params) {
  const auto block = static_cast<int>(blockIdx.x);
  return block >= first_importer(params) && block < params.first_receiver;
}

/// One block's import. Importer b takes the far ranks b, b + number of importers, …
class FarImporter {
 public:
  __device__ FarImporter(const FarDispatchReceiveParams& params, const SentCall& sent, FarImportShared& shared)
      : params_(params),
        call_(params.call),
        layout_(params.far.layout),
        sent_(sent),
        shared_(shared),
        message_(FarMessage::of(call_.num_experts, call_.num_topk)) {}

  /// All threads of a block; false in all of them when the group broke.
  __device__ bool import_all() const {
    const int block = static_cast<int>(blockIdx.x) - first_importer(params_);
    const int step = params_.first_receiver - first_importer(params_);
    // With one message to a block, no other header waits for this one, which may be imported beside the units.
    const bool alone = layout_.num_far() <= step;
    bool whole = true;
#pragma unroll 1
    for (int idx = block + warp_idx() * step; whole && idx < layout_.num_far(); idx += kReceiveWarps * step) {
      // At once: this rank's other blocks wait for the headers too, and must blame no rank whose message has come.
      whole = await_far(call_, params_.far, LatencyKind::kDispatch, sent_.number, layout_.far_rank(idx));
      if (whole && !alone) import_front(idx);
    }
    if (__syncthreads_and(static_cast<int>(whole)) == 0) return false;
    int unit = warp_idx();
    PartWords first;
    if (alone) {
      // Under way together with the load of the header, which says whether there is such a unit.
      if (block < layout_.num_far() && unit < num_count_units() + call_.max_tokens) first = load_unit(block, unit);
      if (block < layout_.num_far() && warp_idx() == 0) import_front(block);
      __syncthreads();
    }
    if (lane_idx() == 0) fence_device();  // hands on the rows, which the network has written, with their flags
    __syncwarp();
    // Warps take units of all sources in turn, so that loads from host memory are under way together.
#pragma unroll 1
    for (int idx = block; idx < layout_.num_far(); idx += step) {
      const int num_tokens = shared_.tokens[idx];
      if (num_tokens < 0) continue;
#pragma unroll 1
      for (; unit < num_count_units() + num_tokens; unit += kReceiveWarps) {
        const PartWords words = alone && unit == warp_idx() ? first : load_unit(idx, unit);
        if (unit < num_count_units()) {
          import_count(idx, unit * kWarpLanes + lane_idx(), words.own());
        } else {
          import_token(idx, unit - num_count_units(), words);
        }
      }
      unit -= num_count_units() + num_tokens;
    }
#pragma unroll 1
    for (int idx = block + warp_idx() * step; idx < layout_.num_far(); idx += kReceiveWarps * step) {
      keep_words(params_.far, LatencyKind::kDispatch, static_cast<int>(sent_.set), layout_.far_rank(idx));
    }
    return true;
  }

 private:
  __device__ const std::byte* message_of(int idx) const {
    return params_.far.inbox + layout_.front_at(0, static_cast<int>(sent_.set), idx);
  }
  __device__ void refuse(int idx) const { refuse_message(call_, layout_.far_rank(idx), sent_.number); }

  /// Units of a message: counts, a line each, and then tokens.
  __device__ int num_count_units() const { return (call_.num_experts + kWarpLanes - 1) / kWarpLanes; }
  /// Loads a unit. All lanes of a warp.
  __device__ PartWords load_unit(int idx, int unit) const {
    const std::byte* const message = message_of(idx);
    const int token = unit - num_count_units();
    if (token < 0) {
      const int first = unit * kWarpLanes;
      return {message + message_.counts + first * static_cast<int>(sizeof(std::uint32_t)),
              min(call_.num_experts - first, kWarpLanes)};
    }
    constexpr int kStartWords = sizeof(FarRecord) / sizeof(std::uint32_t);
    return {message + message_.records + token * message_.record_bytes, kStartWords + 2 * call_.num_topk};
  }

  /// Imports the header of a message that has come. All lanes of a warp.
  __device__ void import_front(int idx) const {
    const int source = layout_.far_rank(idx);
    const FarHeader& header = *reinterpret_cast<const FarHeader*>(message_of(idx));
    const std::uint32_t word = word_of_header(header);
    const std::int64_t num_rows = field_of_header(word, offsetof(FarHeader, num_rows));
    const std::int64_t num_returns = field_of_header(word, offsetof(FarHeader, num_returns));
    const std::int64_t first_return = field_of_header(word, offsetof(FarHeader, first_return));
    const std::int64_t first_sum = field_of_header(word, offsetof(FarHeader, first_sum));
    const ReceivedHeader received(word);
    const std::int64_t num_tokens = received.num_tokens();
    const bool same = import_header(call_, params_.far, LatencyKind::kDispatch, sent_, source, word);
    const std::int64_t most_returns = call_.max_tokens * call_.num_topk;
    const std::int64_t most_sums =
        call_.max_tokens * (call_.num_topk < call_.ranks.num_ranks ? call_.num_topk : call_.ranks.num_ranks);
    const bool sound = num_tokens >= 0 && num_tokens <= call_.max_tokens && num_rows >= 0 && num_rows <= num_tokens &&
                       num_returns >= 0 && first_return >= 0 && num_returns <= most_returns &&
                       first_return <= most_returns - num_returns && first_sum >= 0 &&
                       first_sum <= most_sums - num_rows;
    if (lane_idx() != 0) return;
    shared_.tokens[idx] = same && sound ? static_cast<std::int32_t>(num_tokens) : -1;
    if (same && !sound) refuse(idx);
    if (!same || !sound) return;
    shared_.num_rows[idx] = static_cast<std::int32_t>(num_rows);
    shared_.num_returns[idx] = static_cast<std::int32_t>(num_returns);
    call_.tables.rows_back.num_rows[source] = static_cast<std::int32_t>(num_returns);
    call_.tables.rows_back.firsts[source] = static_cast<std::int32_t>(first_return);
    call_.tables.sums_back.num_rows[source] = static_cast<std::int32_t>(num_rows);
    call_.tables.sums_back.firsts[source] = static_cast<std::int32_t>(first_sum);
  }

  /// Imports the count of one expert; refuses more rows than there are tokens.
  __device__ void import_count(int idx, int expert, std::uint32_t count) const {
    if (expert >= call_.num_experts) return;
    if (count > static_cast<std::uint32_t>(shared_.tokens[idx])) {
      refuse(idx);
      return;
    }
    const int source = layout_.far_rank(idx);
    post_word(count_words(call_, call_.ranks.rank, static_cast<int>(sent_.set), source) + expert, sent_.number, count);
  }

  /// Imports one token; refuses a record that no rank of this build sends. Ordinals are checked against counts where
  /// they are used. All lanes of a warp.
  __device__ void import_token(int idx, int token, const PartWords& words) const {
    const int num_topk = call_.num_topk;
    const int source = layout_.far_rank(idx);
    const DispatchSlot slot = slot_of(call_, sent_, source);
    const bool has_entry = lane_idx() < num_topk;
    // Entries and weights mean nothing where there is no row.
    const FarRecord start{static_cast<std::int32_t>(words.of(0)), static_cast<std::int32_t>(words.of(1))};
    constexpr int kFirst = sizeof(FarRecord) / sizeof(std::uint32_t);
    std::uint32_t entry = words.of(kFirst + (has_entry ? lane_idx() : 0));
    const std::uint32_t weight = words.of(kFirst + (has_entry ? num_topk + lane_idx() : 0));
    if (!has_entry) entry = kNoExpert;
    const bool has_row = start.row >= 0;
    if (!has_row) entry = kNoExpert;
    const bool sound = start.row >= -1 && start.row < shared_.num_rows[idx] &&
                       (!has_row || (start.first_return >= 0 && start.first_return <= shared_.num_returns[idx])) &&
                       (entry == kNoExpert || entry_expert(entry) < call_.num_experts);
    if (__all_sync(kAllLanes, static_cast<int>(sound)) == 0) {
      if (lane_idx() == 0) refuse(idx);
      return;
    }
    if (lane_idx() == 0) {
      call_.tables.rows_back.places[source * call_.max_tokens + token] = start.first_return;
      call_.tables.sums_back.places[source * call_.max_tokens + token] = start.row;
    }
    if (has_entry) {
      post_word(slot.entries + token * num_topk + lane_idx(), sent_.number, entry);
      if (has_row && call_.tables.item_weights != nullptr) {
        post_word(slot.weights + token * num_topk + lane_idx(), sent_.number, weight);
      }
    }
    if (lane_idx() != 0 || !has_row) return;
    post_word(slot.row_flags + token, sent_.number, static_cast<std::uint32_t>(start.row));
  }

  const FarDispatchReceiveParams& params_;
  const LatencyParams& call_;
  const FarLayout& layout_;
  const SentCall& sent_;
  FarImportShared& shared_;
  const FarMessage message_;
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_FAR_RECEIVE_CUH
