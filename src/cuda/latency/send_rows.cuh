#ifndef FERRY_CUDA_LATENCY_SEND_ROWS_CUH
#define FERRY_CUDA_LATENCY_SEND_ROWS_CUH

/// Sends one row of x to every rank that gets it, with all warps of a block but the first: reads it once, quantises it
/// if asked, stores it to each rank. A row is cut into steps, each as large as the registers of those warps hold; the
/// first step is loaded and quantised before the row's targets are known.

#include <cstddef>
#include <cstdint>

#include "cuda/latency/words.cuh"
#include "cuda/numeric/quantize.cuh"
#include "ferry/routing.hpp"
#include "numeric/quantize.hpp"

namespace ferry::cuda::device {

inline constexpr int kRowThreads = kDispatchThreads - kWarpLanes;
/// Bytes of a unit of x, and of the eight bf16 channels that a lane quantises.
inline constexpr int kUnitBytes = sizeof(uint4);
/// Units of a thread in a step: with two, a step holds 15 KiB.
inline constexpr int kThreadUnits = 2;
inline constexpr int kStepUnits = kThreadUnits * kRowThreads;
inline constexpr int kStepBlocks = kStepUnits / kBlockLanes;
static_assert(kStepUnits % kBlockLanes == 0 && kStepBlocks % sizeof(std::uint32_t) == 0);

/// Places of a row on its ranks. In shared memory.
struct RowTargets {
  int num = 0;
  std::byte* rows[kMaxTopk];
};

template <typename Word>
__device__ inline void store_to_all(const RowTargets& targets, std::int64_t offset, const Word& word) {
#pragma unroll 1
  for (int i = 0; i < targets.num; ++i) *reinterpret_cast<Word*>(targets.rows[i] + offset) = word;
}

enum class Codec { kPlain, kFp8, kInt8 };

/// One thread's part of a step of a row.
template <Codec kCodec>
class RowStep {
 public:
  __device__ explicit RowStep(const DispatchSendParams& params)
      : num_units_(static_cast<int>(kCodec == Codec::kPlain ? params.row.x_bytes / kUnitBytes
                                                            : params.hidden / kLaneChannels)) {}

  __device__ int num_units() const { return num_units_; }

  /// Loads units of the row from `first` on; zeros beyond its end.
  __device__ void load(const std::byte* row, int first) {
#pragma unroll
    for (int i = 0; i < kThreadUnits; ++i) {
      const int unit = unit_of(first, i);
      values_[i] = unit < num_units_ ? reinterpret_cast<const uint4*>(row)[unit] : make_uint4(0, 0, 0, 0);
    }
  }

  /// Quantises the loaded units; scales go to `scale_words` [kStepBlocks] in shared memory. Whole warps.
  __device__ void quantize(const DispatchSendParams& params, int first, std::uint32_t* scale_words) {
    if constexpr (kCodec != Codec::kPlain) {
      constexpr bool kIsInt8 = kCodec == Codec::kInt8;
      // Always quantises the first of the values, which then becomes the last: half the code, and code takes longer to
      // fetch than to run.
#pragma unroll 1
      for (int i = 0; i < kThreadUnits; ++i) {
        const LaneChannels channels = channels_of_bfloat16(values_[0]);
        const numeric::BlockScale scale = scale_of_block<kIsInt8>(channels, params.quantize);
        const uint2 codes = quantize_channels<kIsInt8>(channels, scale);
#pragma unroll
        for (int k = 1; k < kThreadUnits; ++k) values_[k - 1] = values_[k];
        values_[kThreadUnits - 1].x = codes.x;
        values_[kThreadUnits - 1].y = codes.y;
        const int block = (unit_of(first, i) - first) / kBlockLanes;
        if (lane_idx() % kBlockLanes != 0) continue;
        if (params.quantize == Quantization::kFp8Ue8m0) {
          reinterpret_cast<std::uint8_t*>(scale_words)[block] = scale.exponent;
        } else {
          scale_words[block] = numeric::bits_of(scale.stored);
        }
      }
    }
  }

  /// Stores the step to all targets: RowTargets, or another type that store_to_all() takes.
  template <typename Targets>
  __device__ void store(const Targets& targets, int first) const {
#pragma unroll
    for (int i = 0; i < kThreadUnits; ++i) {
      const int unit = unit_of(first, i);
      if (unit >= num_units_) continue;
      if constexpr (kCodec == Codec::kPlain) {
        store_to_all(targets, std::int64_t{unit} * kUnitBytes, values_[i]);
      } else {
        store_to_all(targets, std::int64_t{unit} * kLaneChannels, make_uint2(values_[i].x, values_[i].y));
      }
    }
  }

  /// Stores the scales that quantize() found for the step.
  template <typename Targets>
  __device__ void store_scales(const DispatchSendParams& params, const Targets& targets, int first,
                               const std::uint32_t* scale_words) const {
    constexpr int kExponents = sizeof(std::uint32_t);
    const bool exponents = params.quantize == Quantization::kFp8Ue8m0;
    const int first_block = first / kBlockLanes;
    const int left = (num_units_ + kBlockLanes - 1) / kBlockLanes - first_block;
    const int num_blocks = left < kStepBlocks ? left : kStepBlocks;
    const int num_words = exponents ? (num_blocks + kExponents - 1) / kExponents : num_blocks;
    const std::int64_t to = params.row.scales_offset() + std::int64_t{first_block} * (exponents ? 1 : kExponents);
    const int word = row_thread();
    static_assert(kStepBlocks <= kRowThreads);
    if (word >= num_words) return;
    std::uint32_t scales = scale_words[word];
    // Exponents beyond the last block are 0.
    const int missing = exponents ? (word + 1) * kExponents - num_blocks : 0;
    if (missing > 0) scales &= 0xFFFFFFFFU >> (missing * 8);
    store_to_all(targets, to + word * kExponents, scales);
  }

 private:
  __device__ static int row_thread() { return static_cast<int>(threadIdx.x) - kWarpLanes; }
  __device__ static int unit_of(int first, int i) { return first + i * kRowThreads + row_thread(); }

  int num_units_;
  uint4 values_[kThreadUnits];
};

/// Sends scales that came with x.
template <typename Targets>
__device__ inline void send_given_scales(const DispatchSendParams& params, std::int64_t token, const Targets& targets) {
  const ConstScales& scales = params.scales;
#pragma unroll 1
  for (int column = static_cast<int>(threadIdx.x) - kWarpLanes; column < params.row.num_scales; column += kRowThreads) {
    const std::int64_t at = token * scales.row_stride + column * scales.column_stride;
    const std::int64_t to = params.row.scales_offset() + std::int64_t{column} * params.row.scale_bytes;
    if (params.row.scale_bytes == sizeof(std::uint32_t)) {
      store_to_all(targets, to, reinterpret_cast<const std::uint32_t*>(scales.data)[at]);
    } else {
      store_to_all(targets, to, scales.data[at]);
    }
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_SEND_ROWS_CUH
