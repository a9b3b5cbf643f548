#ifndef FERRY_CUDA_LATENCY_FAR_MESSAGE_HPP
#define FERRY_CUDA_LATENCY_FAR_MESSAGE_HPP

/// Parts of a dispatch's message to a rank of another node (cuda/far/params.hpp): behind the header counts of all
/// experts, and a record for each token; then the rows.

#include <cstddef>
#include <cstdint>

#include "cuda/far/params.hpp"
#include "cuda/latency/window.hpp"
#include "plan/host_device.hpp"

namespace ferry::cuda {

/// Start of a token's record. The token's entries [K] (pack_entry, kNoExpert: none) and weights [K] follow.
struct FarRecord {
  std::int32_t row;           ///< the token's row in the message; -1: none, and nothing else is written
  std::int32_t first_return;  ///< place of the token's first row among those that the receiver returns
};

struct FarMessage {
  std::int64_t counts = static_cast<std::int64_t>(kFarHeaderBytes);  ///< [E] u32
  std::int64_t records = 0;                                          ///< [T of the source]
  std::int64_t record_bytes = 0;

  FERRY_HOST_DEVICE static constexpr FarMessage of(std::int64_t num_experts, int num_topk) {
    FarMessage message;
    message.records = message.counts + round_up_row(num_experts * std::int64_t{sizeof(std::uint32_t)});
    message.record_bytes = record_bytes_of(num_topk);
    return message;
  }
  FERRY_HOST_DEVICE constexpr std::int64_t front_bytes(std::int64_t num_tokens) const {
    return records + num_tokens * record_bytes;
  }
  /// Rows follow the records of the tokens that the source has, so that a message is one put.
  FERRY_HOST_DEVICE constexpr std::int64_t rows_at(std::int64_t num_tokens) const {
    return round_up_row(front_bytes(num_tokens));
  }

  /// A power of two, so that no two tokens of 8 picks or more share a line: warps that load one line of host memory
  /// wait for each other.
  FERRY_HOST_DEVICE static constexpr std::int64_t record_bytes_of(int num_topk) {
    const std::int64_t used = std::int64_t{sizeof(FarRecord)} + num_topk * 2 * std::int64_t{sizeof(std::uint32_t)};
    std::int64_t bytes = 16;
    while (bytes < used) bytes *= 2;
    return bytes;
  }
};

/// Layout of the inboxes of a group whose window is `window`: they hold what the window holds. A slot of words has 8
/// bytes for each token and 16 for each entry, so it has room for the records; in a combine 8 for each entry, whose
/// weight has 4.
constexpr FarLayout far_layout(const LatencyLayout& window, int num_ranks, int ranks_per_node, int rank,
                               bool in_gpu = false) {
  constexpr std::int64_t kCountsBytes = kMaxExperts * std::int64_t{sizeof(std::uint32_t)};
  return FarLayout::of({.num_ranks = num_ranks,
                        .ranks_per_node = ranks_per_node,
                        .rank = rank,
                        .front_bytes = kCountsBytes + window.slot_bytes + kRowAlignment,
                        .rows_bytes = window.source_bytes,
                        .returns_bytes = window.rows_bytes(),
                        .weights_bytes = round_up_row(window.slot_bytes / 2),
                        .in_gpu = in_gpu});
}

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LATENCY_FAR_MESSAGE_HPP
