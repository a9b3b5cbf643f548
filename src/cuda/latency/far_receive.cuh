#ifndef FERRY_CUDA_LATENCY_FAR_RECEIVE_CUH
#define FERRY_CUDA_LATENCY_FAR_RECEIVE_CUH

/// Part of a dispatch's receive half for ranks of other nodes: some of its blocks, the *importers*, write the words of
/// the fronts of their messages into this rank's window, where the blocks that copy rows wait for them. The rows stay
/// in the inbox; the flag of a token's row says which one it is.

#include "cuda/latency/dispatch_receive.cuh"
#include "cuda/latency/far_keeper.cuh"
#include "cuda/latency/far_message.hpp"
#include "cuda/latency/far_words.cuh"
#include "ferry/routing.hpp"

namespace ferry::cuda::device {

/// State of an importer, in dynamic shared memory.
struct FarImportShared {
  std::int32_t tokens[kMaxRanks];    ///< by number of the far rank: its T; -1: it makes another call
  std::int32_t num_rows[kMaxRanks];  ///< FarFields
  std::int32_t num_returns[kMaxRanks];
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
    // Usually a block has one message. This warp's first unit is then under way together with the header, which says
    // whether there is such a unit.
    int unit = warp_idx();
    LaneFarWords first;
    const bool looks = layout_.in_gpu && block < layout_.num_far() && unit < num_count_units() + call_.max_tokens;
    if (looks) first = load_unit(block, unit);
    bool whole = true;
#pragma unroll 1
    for (int idx = block + warp_idx() * step; whole && idx < layout_.num_far(); idx += kReceiveWarps * step) {
      // At once: this rank's other blocks wait for the headers too, and must blame no rank whose message has come.
      whole = import_front(idx);
    }
    if (__syncthreads_and(static_cast<int>(whole)) == 0) return false;
    if (!layout_.in_gpu) fence_device();  // hands on rows, which the network has written, with their flags
      // Warps take units of all sources in turn, so that loads are under way together.
#pragma unroll 1
    for (int idx = block; whole && idx < layout_.num_far(); idx += step) {
      const int num_tokens = shared_.tokens[idx];
      if (num_tokens < 0) continue;
      const int num_units = num_count_units() + num_tokens;
      LaneFarWords next;
      if (unit < num_units) next = looks && idx == block ? first : load_unit(idx, unit);
#pragma unroll 1
      for (; whole && unit < num_units; unit += kReceiveWarps) {
        LaneFarWords words = next;
        if (unit + kReceiveWarps < num_units) next = load_unit(idx, unit + kReceiveWarps);
        whole = unit < num_count_units() ? import_counts(idx, unit, words)
                                         : import_token(idx, unit - num_count_units(), words);
      }
      unit -= num_units;
    }
    if (__syncthreads_and(static_cast<int>(whole)) == 0) return false;
#pragma unroll 1
    for (int idx = block + warp_idx() * step; idx < layout_.num_far(); idx += kReceiveWarps * step) {
      FarKeeper keeper(params_.far, layout_.far_rank(idx));
      keeper.note(call_, LaneFarWords(message_of(idx), kFarHeaderWords));
      keeper.keep(call_, params_.far);
    }
    if (block == 0 && warp_idx() == kReceiveWarps - 1) {
      keep_departures(call_, params_.far, [] { return true; });
    }
    return true;
  }

 private:
  __device__ const std::byte* message_of(int idx) const {
    return params_.far.inbox + layout_.header_at(0, static_cast<int>(sent_.set), idx);
  }
  __device__ void refuse(int idx) const { refuse_message(call_, layout_.far_rank(idx), sent_.number); }

  /// Units of a message: counts, as many as the words of a warp hold, and then tokens.
  static constexpr int kUnitCounts = kWarpLanes * kFarWordPayloads;
  __device__ int num_count_units() const { return (call_.num_experts + kUnitCounts - 1) / kUnitCounts; }
  __device__ const std::byte* unit_at(int idx, int unit) const {
    const int token = unit - num_count_units();
    return message_of(idx) + (token < 0 ? message_.counts + unit * kWarpLanes * kFarWordBytes : message_.record(token));
  }
  __device__ int num_unit_words(int unit) const {
    static_assert(num_far_words(kFarRecordPayloads + 2 * kMaxTopk) <= kWarpLanes);
    if (unit >= num_count_units()) return static_cast<int>(message_.record_bytes / kFarWordBytes);
    return min(kWarpLanes, static_cast<int>(num_far_words(call_.num_experts)) - unit * kWarpLanes);
  }
  /// Loads a unit, which may not have come. All lanes of a warp.
  __device__ LaneFarWords load_unit(int idx, int unit) const { return {unit_at(idx, unit), num_unit_words(unit)}; }
  /// Waits for a unit that was loaded before; false when the group broke.
  __device__ bool await_unit(int idx, int unit, LaneFarWords& words) const {
    const Wait wait{Awaited::kRow, layout_.far_rank(idx), sent_.number};
    return await_part(call_, wait, unit_at(idx, unit), num_unit_words(unit), words);
  }

  /// Waits for the header of a message, and imports it; false when the group broke. All lanes of a warp.
  __device__ bool import_front(int idx) const {
    const int source = layout_.far_rank(idx);
    LaneFarWords header;
    if (!await_far_header(call_, params_.far, LatencyKind::kDispatch, sent_, source, header)) return false;
    const bool same = import_header(call_, params_.far, LatencyKind::kDispatch, sent_, source, header);
    const std::int64_t num_tokens = ReceivedHeader(header.payload(lane_idx())).num_tokens();
    const FarFields fields = fields_of(header);
    const auto [num_rows, num_returns, first_return, first_sum] = fields;
    const bool sound = are_sound(call_, fields, num_tokens);
    if (lane_idx() == 0) {
      shared_.tokens[idx] = same && sound ? static_cast<std::int32_t>(num_tokens) : -1;
      if (same && !sound) refuse(idx);
      if (same && sound) {
        shared_.num_rows[idx] = num_rows;
        shared_.num_returns[idx] = num_returns;
        call_.tables.rows_back.num_rows[source] = num_returns;
        call_.tables.rows_back.firsts[source] = first_return;
        call_.tables.sums_back.num_rows[source] = num_rows;
        call_.tables.sums_back.firsts[source] = first_sum;
      }
    }
    return true;
  }

  /// Imports some counts; refuses more rows of an expert than there are tokens. False when the group broke. All lanes
  /// of a warp.
  __device__ bool import_counts(int idx, int unit, LaneFarWords& words) const {
    if (!await_unit(idx, unit, words)) return false;
    const int source = layout_.far_rank(idx);
    std::uint64_t* const to = count_words(call_, call_.ranks.rank, static_cast<int>(sent_.set), source);
#pragma unroll
    for (int i = 0; i < kFarWordPayloads; ++i) {
      const int at = i * kWarpLanes + lane_idx();
      const std::uint32_t count = words.payload(at);
      const int expert = unit * kUnitCounts + at;
      if (expert >= call_.num_experts) continue;
      if (count > static_cast<std::uint32_t>(shared_.tokens[idx])) {
        refuse(idx);
      } else {
        post_word(to + expert, sent_.number, count);
      }
    }
    return true;
  }

  /// Imports one token; refuses a record that no rank of this build sends. Ordinals are checked against counts where
  /// they are used. False when the group broke. All lanes of a warp.
  __device__ bool import_token(int idx, int token, LaneFarWords& words) const {
    if (!await_unit(idx, num_count_units() + token, words)) return false;
    const int num_topk = call_.num_topk;
    const int source = layout_.far_rank(idx);
    const DispatchSlot slot = slot_of(call_, sent_, source);
    const bool has_entry = lane_idx() < num_topk;
    // Entries and weights mean nothing where there is no row.
    const FarRecord start{static_cast<std::int32_t>(words.payload(0)), static_cast<std::int32_t>(words.payload(1))};
    std::uint32_t entry = words.payload(kFarRecordPayloads + (has_entry ? lane_idx() : 0));
    const std::uint32_t weight = words.payload(kFarRecordPayloads + (has_entry ? num_topk + lane_idx() : 0));
    const bool has_row = start.row >= 0;
    if (!has_entry || !has_row) entry = kNoExpert;
    const bool sound = start.is_sound(shared_.num_rows[idx], shared_.num_returns[idx]) &&
                       (entry == kNoExpert || entry_expert(entry) < call_.num_experts);
    if (__all_sync(kAllLanes, static_cast<int>(sound)) == 0) {
      if (lane_idx() == 0) refuse(idx);
      return true;
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
    if (lane_idx() == 0 && has_row) {
      post_word(slot.row_flags + token, sent_.number, static_cast<std::uint32_t>(start.row));
    }
    return true;
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
