#ifndef FERRY_CUDA_LATENCY_FAR_MESSAGE_HPP
#define FERRY_CUDA_LATENCY_FAR_MESSAGE_HPP

/// Parts of messages to ranks of other nodes (cuda/far/params.hpp). Those of a dispatch are, in the order of their
/// addresses: rows that are words, a record for each token, counts of all experts, the header, and rows that are no
/// words. So the header has one place, and whatever a message has is one put. So is a combine of few tokens: the
/// header and its sums.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/far/params.hpp"
#include "cuda/latency/window.hpp"
#include "ferry/routing.hpp"
#include "plan/host_device.hpp"

namespace ferry::cuda {

/// First payloads of a token's record. The token's entries [K] (pack_entry, kNoExpert: none) and weights [K] follow.
struct FarRecord {
  std::int32_t row;           ///< the token's row in the message; -1: none, and only this word of the record counts
  std::int32_t first_return;  ///< place of the token's first row among those that the receiver returns

  /// Whether a rank of this build sends it in a message of so many rows, for which so many are returned.
  FERRY_HOST_DEVICE constexpr bool is_sound(std::int32_t num_rows, std::int32_t num_returns) const {
    return row >= -1 && row < num_rows && (row < 0 || (first_return >= 0 && first_return <= num_returns));
  }
};
inline constexpr int kFarRecordPayloads = sizeof(FarRecord) / sizeof(std::uint32_t);

/// Offsets are from the header.
struct FarMessage {
  std::int64_t counts = 0;  ///< [E]
  std::int64_t record_bytes = 0;
  static constexpr std::int64_t kPlainRows = kFarHeaderBytes;

  FERRY_HOST_DEVICE static constexpr FarMessage of(std::int64_t num_experts, int num_topk) {
    FarMessage message;
    message.counts = -num_far_words(num_experts) * kFarWordBytes;
    message.record_bytes = num_far_words(kFarRecordPayloads + 2 * num_topk) * kFarWordBytes;
    return message;
  }
  FERRY_HOST_DEVICE constexpr std::int64_t record(std::int64_t token) const {
    return counts - (token + 1) * record_bytes;
  }
  /// Begin of the words of a message of so many tokens, whose first rows are words `stride` apart. Also the place of
  /// the last of these rows.
  FERRY_HOST_DEVICE constexpr std::int64_t words(std::int64_t num_tokens, std::int64_t num_rows,
                                                 std::int64_t stride) const {
    return counts - num_tokens * record_bytes - num_rows * stride;
  }
};

/// Vectors of a step of a row that travels between nodes as words (kWordStepVectors): half as many bytes more, and less
/// to do in turn for each warp than with three.
inline constexpr int kFarStepVectors = 2;

/// Bytes of a row's words. The row is padded to whole lines, so that every byte of a put is a word that its receiver
/// waits for: one that came later could replace a word of the set's next call.
FERRY_HOST_DEVICE constexpr std::int64_t far_row_words_bytes(std::int64_t row_bytes) {
  const std::int64_t num_lines = (row_bytes + kWordLineBytes - 1) / kWordLineBytes;
  return (num_lines + (num_lines + kFarStepVectors - 1) / kFarStepVectors) * kWordLineBytes;
}

/// Most tokens of a rank whose rows travel between nodes as words. Between two H200 over a card's stand-in of 50 GB/s
/// (docs/performance-nodes.md) a pair of 16 tokens took 69 us with words and 80 without, of 32 tokens 84 and 86, of 64
/// tokens 125 and 114: words have half as many bytes more, and take no trips for their order.
inline constexpr std::int64_t kFarWordTokens = 32;
/// Most tokens of a rank in a combine that the kernels for few tokens make: all its sums are words.
inline constexpr std::int64_t kFarSumTokens = kWordTokens;
/// The same for FP8 sums, whose words take half of the memory.
inline constexpr std::int64_t kFarFp8SumTokens = 2 * kWordTokens;
/// Most bytes by which words may lengthen what a rank returns in such a combine of more than kFarWordTokens. One MiB
/// takes 21 us at 50 GB/s. With both ranks on one H200 over the stand-in, pairs of 64 tokens took 108 us with FP8 sums
/// as rows and 86 as words (0.2 MiB longer), of 128 tokens 146 and 131 (0.4 MiB).
inline constexpr std::int64_t kMostLongerSums = std::int64_t{1} << 20;
/// Longest row that is words.
inline constexpr std::int64_t kMostFarWordRow = 16384;

/// Rows of a call that may be words.
struct FarWordRows {
  std::int64_t num_tokens = 0;  ///< T of the rank that they belong to
  std::int64_t num_rows = 0;    ///< most that one message may have, or one set of returns
  std::int64_t room_bytes = 0;  ///< for them
};
/// Whether there is room for so many rows as words. `stride`: bytes of the words of a row of `row_bytes`.
FERRY_HOST_DEVICE constexpr bool far_words_fit(std::int64_t row_bytes, std::int64_t stride, std::int64_t num_rows,
                                               std::int64_t room_bytes) {
  return num_rows * stride <= room_bytes && room_bytes > 0 && row_bytes <= kMostFarWordRow;
}
/// Stride of rows that are words, if those of a call are; else 0.
FERRY_HOST_DEVICE constexpr std::int64_t far_word_stride(std::int64_t row_bytes, const FarWordRows& rows) {
  const std::int64_t stride = far_row_words_bytes(row_bytes);
  const bool fits = far_words_fit(row_bytes, stride, rows.num_rows, rows.room_bytes);
  return fits && rows.num_tokens <= kFarWordTokens ? stride : 0;
}
/// The same of the rows of a dispatch.
FERRY_HOST_DEVICE constexpr std::int64_t far_word_stride(const FarLayout& layout, std::int64_t row_bytes,
                                                         std::int64_t num_tokens) {
  return far_word_stride(row_bytes, {num_tokens, num_tokens, layout.row_words_bytes});
}

/// Layout of the inboxes of a group whose window is `window`: they hold what the window holds. A slot of words has 8
/// bytes for each token and 16 for each entry, and a record at most a third more; in a combine it has 8 for each entry,
/// whose weight has a third of a word.
constexpr FarLayout far_layout(const LatencyLayout& window, int num_ranks, int ranks_per_node, int rank,
                               bool in_gpu = false) {
  constexpr std::int64_t kCountsBytes = num_far_words(kMaxExperts) * kFarWordBytes;
  // For most shapes; other calls have rows that are no words.
  constexpr std::int64_t kMostRowWords = kFarWordTokens * far_row_words_bytes(kMostFarWordRow);
  constexpr std::int64_t kShortRowWords = kFarWordTokens * far_row_words_bytes(1);
  constexpr std::int64_t kMostSumWords = kFarSumTokens * far_row_words_bytes(kMostFarWordRow);
  const std::int64_t returned_words = (window.rows_bytes() + kShortRowWords) * 3 / 2;
  return FarLayout::of(
      {.num_ranks = num_ranks,
       .ranks_per_node = ranks_per_node,
       .rank = rank,
       .front_bytes = round_up_row(kCountsBytes + window.slot_bytes * 4 / 3) + kRowAlignment,
       .row_words_bytes = round_up_row(std::min(kMostRowWords, window.source_bytes * 3 / 2 + kShortRowWords)),
       .rows_bytes = window.source_bytes,
       .sum_words_bytes = num_ranks > kSmallRanks ? 0 : round_up_row(std::min(kMostSumWords, returned_words)),
       .return_words_bytes = round_up_row(std::min(kMostRowWords * kMaxTopk, returned_words)),
       .returns_bytes = window.rows_bytes(),
       .weights_bytes = round_up_row(window.slot_bytes * 2 / 3) + kRowAlignment,
       .in_gpu = in_gpu});
}

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LATENCY_FAR_MESSAGE_HPP
