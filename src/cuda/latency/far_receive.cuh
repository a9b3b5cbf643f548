#ifndef FERRY_CUDA_LATENCY_FAR_RECEIVE_CUH
#define FERRY_CUDA_LATENCY_FAR_RECEIVE_CUH

/// The part of a dispatch's receive half that comes from other nodes: writes the messages of far ranks into this rank's
/// window. Some blocks share the tokens of one source.

#include "cuda/copy/warp_copy.cuh"
#include "cuda/latency/far_message.hpp"
#include "cuda/latency/far_words.cuh"

namespace ferry::cuda::device {

class FarImporter {
 public:
  __device__ FarImporter(const FarReceiveParams& params, const SentCall& sent, int source)
      : params_(params),
        call_(params.call),
        sent_(sent),
        source_(source),
        layout_(FarMessage::of(call_.num_experts, call_.max_tokens, call_.num_topk)),
        header_(header_in(params.far, LatencyKind::kDispatch, static_cast<int>(sent.set), source)),
        message_(reinterpret_cast<const std::byte*>(&header_)) {}

  /// All threads of a block, which is number `part` of `num_parts` for this source.
  __device__ void import_all(int part, int num_parts) const {
    const ReceivedHeader received(header_.words[lane_idx() < kLatencyHeaderWords ? lane_idx() : 0]);
    const std::int64_t num_tokens = received.num_tokens();
    const std::int64_t num_rows = header_.num_rows;
    const std::int64_t num_returns = header_.num_returns;
    const std::int64_t most_returns = call_.max_tokens * call_.num_topk;
    const std::int64_t most_sums =
        call_.max_tokens * (call_.num_topk < call_.ranks.num_ranks ? call_.num_topk : call_.ranks.num_ranks);
    const bool sound = num_tokens >= 0 && num_tokens <= call_.max_tokens && num_rows >= 0 && num_rows <= num_tokens &&
                       num_returns >= 0 && header_.first_return >= 0 && num_returns <= most_returns &&
                       header_.first_return <= most_returns - num_returns && header_.first_sum >= 0 &&
                       header_.first_sum <= most_sums - num_rows;
    if (!sound) {
      if (threadIdx.x == 0) refuse_message(call_, source_, sent_.number);
      return;
    }
    if (part == 0 && !import_counts(num_tokens, num_rows, num_returns)) return;
    const int num_warps = static_cast<int>(blockDim.x) / kWarpLanes;
#pragma unroll 1
    for (std::int64_t token = warp_idx() * num_parts + part; token < num_tokens; token += num_warps * num_parts) {
      if (!import(token, num_rows, num_returns)) return;
    }
  }

 private:
  /// False if an expert has more rows than there are tokens. All threads of a block.
  __device__ bool import_counts(std::int64_t num_tokens, std::int64_t num_rows, std::int64_t num_returns) const {
    std::uint64_t* const words = count_words(call_, call_.ranks.rank, static_cast<int>(sent_.set), source_);
    const auto* const counts = reinterpret_cast<const std::uint32_t*>(message_ + layout_.counts);
    bool sound = true;
#pragma unroll 1
    for (auto expert = static_cast<int>(threadIdx.x); expert < call_.num_experts;
         expert += static_cast<int>(blockDim.x)) {
      sound = sound && counts[expert] <= static_cast<std::uint64_t>(num_tokens);
    }
    if (__syncthreads_and(static_cast<int>(sound)) == 0) {
      if (threadIdx.x == 0) refuse_message(call_, source_, sent_.number);
      return false;
    }
#pragma unroll 1
    for (auto expert = static_cast<int>(threadIdx.x); expert < call_.num_experts;
         expert += static_cast<int>(blockDim.x)) {
      post_word(words + expert, sent_.number, counts[expert]);
    }
    if (threadIdx.x == 0) {
      call_.tables.rows_back.num_rows[source_] = static_cast<std::int32_t>(num_returns);
      call_.tables.rows_back.firsts[source_] = static_cast<std::int32_t>(header_.first_return);
      call_.tables.sums_back.num_rows[source_] = static_cast<std::int32_t>(num_rows);
      call_.tables.sums_back.firsts[source_] = static_cast<std::int32_t>(header_.first_sum);
    }
    return true;
  }

  /// One token; false if its record is none that a rank of this build sends. All lanes of a warp.
  __device__ bool import(std::int64_t token, std::int64_t num_rows, std::int64_t num_returns) const {
    const auto set = static_cast<int>(sent_.set);
    const int num_topk = call_.num_topk;
    const DispatchSlot slot = DispatchSlot::at(
        own_window(call_).slot(call_.layout, LatencyKind::kDispatch, set, source_), call_.max_tokens, num_topk);
    const std::int64_t row = reinterpret_cast<const std::int32_t*>(message_ + layout_.row_of_token)[token];
    std::uint64_t* const entry_word = slot.entries + token * num_topk + lane_idx();
    const bool has_entry = lane_idx() < num_topk;
    if (row < 0) {
      if (has_entry) post_word(entry_word, sent_.number, kNoExpert);
      return true;
    }
    const std::byte* const record = message_ + layout_.records + (row < num_rows ? row : 0) * layout_.record_bytes;
    const FarRecord start = *reinterpret_cast<const FarRecord*>(record);
    const auto* const words = reinterpret_cast<const std::uint32_t*>(record + sizeof(FarRecord));
    const std::uint32_t entry = has_entry ? words[lane_idx()] : kNoExpert;
    const auto* const counts = reinterpret_cast<const std::uint32_t*>(message_ + layout_.counts);
    bool sound = row < num_rows && start.token == token && start.first_return >= 0 && start.first_return <= num_returns;
    if (entry != kNoExpert) {
      const int expert = entry_expert(entry);
      sound = sound && expert < call_.num_experts && static_cast<std::uint32_t>(entry_ordinal(entry)) < counts[expert];
    }
    if (__all_sync(kAllLanes, static_cast<int>(sound)) == 0) {
      if (lane_idx() == 0) refuse_message(call_, source_, sent_.number);
      return false;
    }
    if (lane_idx() == 0) {
      call_.tables.rows_back.places[source_ * call_.max_tokens + token] = start.first_return;
      call_.tables.sums_back.places[source_ * call_.max_tokens + token] = static_cast<std::int32_t>(row);
    }
    if (has_entry) {
      if (call_.tables.item_weights != nullptr) {
        post_word(slot.weights + token * num_topk + lane_idx(), sent_.number, words[num_topk + lane_idx()]);
      }
      post_word(entry_word, sent_.number, entry);
    }
    std::byte* const to = own_window(call_).rows(call_.layout, LatencyKind::kDispatch, set) +
                          source_ * call_.layout.source_bytes + token * params_.row.stride();
    copy_by_warp(to, message_ + params_.far.layout.front_bytes + row * params_.row.stride(), params_.row.stride());
    __syncwarp();
    if (lane_idx() == 0) {
      fence_system();
      post_word(slot.row_flags + token, sent_.number, 0);
    }
    return true;
  }

  const FarReceiveParams& params_;
  const LatencyParams& call_;
  const SentCall& sent_;
  const int source_;
  const FarMessage layout_;
  const FarHeader& header_;
  const std::byte* const message_;
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_FAR_RECEIVE_CUH
