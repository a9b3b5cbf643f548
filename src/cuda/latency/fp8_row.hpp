#ifndef FERRY_CUDA_LATENCY_FP8_ROW_HPP
#define FERRY_CUDA_LATENCY_FP8_ROW_HPP

/// Layout of a rank's sum that travels as FP8 (LatencyCombineOptions::wire_format): the E4M3 codes of all channels,
/// then an f32 scale for each block of 128. A warp moves it in steps of 1,024 channels. As words, a lane has in a step
/// 32 codes and one of the scales of its half of the warp, which fill three words; the last step is padded, so that a
/// row's words are whole steps.

#include <cstdint>

#include "cuda/latency/window.hpp"
#include "ferry/quantization.hpp"
#include "plan/host_device.hpp"

namespace ferry::cuda {

/// Lines of bf16 that a warp moves in a step.
inline constexpr int kFp8StepVectors = 4;
inline constexpr int kFp8StepBytes = kFp8StepVectors * kWordLineBytes;  ///< of the bf16 row
/// Vectors of codes that a lane has in a step; with the scales one word more holds them.
inline constexpr int kFp8CodeVectors = kFp8StepVectors / 2;
inline constexpr int kFp8StepWordsBytes = (kFp8CodeVectors + 1) * kWordLineBytes;
inline constexpr int kBfloat16Bytes = 2;

/// `row_bytes`: of the bf16 row, as below.
FERRY_HOST_DEVICE constexpr std::int64_t fp8_row_bytes(std::int64_t row_bytes) {
  const std::int64_t num_channels = row_bytes / kBfloat16Bytes;
  return num_channels + num_channels / kQuantBlockSize * static_cast<std::int64_t>(sizeof(float));
}
/// Bytes of a row's words.
FERRY_HOST_DEVICE constexpr std::int64_t fp8_row_words_bytes(std::int64_t row_bytes) {
  return (row_bytes + kFp8StepBytes - 1) / kFp8StepBytes * kFp8StepWordsBytes;
}
/// Offset of the words of the step that begins at `begin` bytes of the bf16 row.
FERRY_HOST_DEVICE constexpr int fp8_word_offset(int begin) { return begin / kFp8StepBytes * kFp8StepWordsBytes; }

/// LatencyLayout::word_step_vectors of sums that are FP8. They are words only in kernels for few ranks.
constexpr int fp8_step_vectors(const LatencyLayout& layout, std::int64_t row_bytes, std::int64_t max_tokens,
                               std::int64_t num_ranks) {
  const bool fits = max_tokens * fp8_row_words_bytes(row_bytes) <= layout.row_words_bytes;
  return max_tokens <= kWordTokens && num_ranks <= kSmallRanks && fits ? kFp8StepVectors : 0;
}

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LATENCY_FP8_ROW_HPP
