#ifndef FERRY_CUDA_INTERNODE_RECORD_CUH
#define FERRY_CUDA_INTERNODE_RECORD_CUH

/// Words of a token's record (plan/token_record.hpp): from the caller's tensors, or as they were received.

#include <cstdint>

#include "cuda/internode/dispatch_params.hpp"
#include "cuda/sync/flags.cuh"

namespace ferry::cuda::device {

/// Copies a record, or other words. All lanes of a warp.
__device__ __noinline__ inline void copy_record(std::byte* to, const std::byte* from, std::int64_t bytes) {
  const auto num_words = static_cast<int>(bytes / static_cast<std::int64_t>(sizeof(std::uint32_t)));
#pragma unroll 1
  for (int word = lane_idx(); word < num_words; word += kWarpLanes) {
    reinterpret_cast<std::uint32_t*>(to)[word] = reinterpret_cast<const std::uint32_t*>(from)[word];
  }
}

/// Record that exists in memory.
struct StoredRecord {
  const std::uint32_t* words;

  __device__ std::uint32_t operator()(int word) const { return words[word]; }
};

/// Record of one of this rank's tokens.
class SourceRecord {
 public:
  __device__ SourceRecord(const RecordParams& params, std::int64_t token) : params_(params), token_(token) {}

  __device__ std::uint32_t operator()(int word) const {
    const plan::TokenRecord& format = params_.format;
    if (word < format.ids_word) return scale_word(word);
    if (word < format.weights_word) return static_cast<std::uint32_t>(params_.ids[entry(word - format.ids_word)]);
    if (word < format.rows_word) return __float_as_uint(params_.weights[entry(word - format.weights_word)]);
    return 0;
  }

 private:
  __device__ std::int64_t entry(int topk) const { return token_ * params_.num_topk + topk; }
  __device__ std::uint32_t scale_word(int word) const {
    const ScaleTable& scales = params_.scales;
    const std::byte* const row = scales.data + token_ * scales.row_stride * scales.element_bytes;
    if (scales.element_bytes == 4) {
      return *reinterpret_cast<const std::uint32_t*>(row + std::int64_t{word} * scales.column_stride * 4);
    }
    std::uint32_t bytes = 0;
    for (int i = 0; i < 4 && word * 4 + i < scales.num_scales; ++i) {
      const std::byte scale = row[(std::int64_t{word} * 4 + i) * scales.column_stride];
      bytes |= static_cast<std::uint32_t>(scale) << (8 * i);
    }
    return bytes;
  }

  const RecordParams& params_;
  std::int64_t token_;
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTERNODE_RECORD_CUH
