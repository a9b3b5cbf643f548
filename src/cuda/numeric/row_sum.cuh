#ifndef FERRY_CUDA_NUMERIC_ROW_SUM_CUH
#define FERRY_CUDA_NUMERIC_ROW_SUM_CUH

/// Weighted sums of rows, in a given order, by a warp's loads: 16 bytes per lane, with all rows of a step loaded before
/// the first is added.

#include <cstddef>
#include <cstdint>

#include "cuda/sync/flags.cuh"
#include "ferry/routing.hpp"
#include "numeric/block_codec.hpp"

namespace ferry::cuda::device {

inline constexpr int kMaxBiases = 2;
/// Most rows of one token: one per entry, and the biases.
inline constexpr int kMaxTerms = kMaxTopk + kMaxBiases;

/// Terms of a token's sum, in order. In shared memory, one per warp.
struct Terms {
  const std::byte* rows[kMaxTerms];
  std::uint8_t first_weight[kMaxTerms + 1];  ///< start of a row's weights in `weights`
  float weights[kMaxTerms];
  int num_rows;
  int num_weights;
  int token;
  int part;  ///< part of the token's row, as divided by BulkSummer
};

/// Rounds two f32 to bf16, to nearest-even, the first in the low half. NaN becomes 0x7FFF.
__device__ inline std::uint32_t round_bfloat16_pair(float low, float high) {
#if __CUDA_ARCH__ >= 800
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));  // PTX ISA, cvt
  return pair;
#else
  return numeric::bfloat16_from_float(low) | static_cast<std::uint32_t>(numeric::bfloat16_from_float(high)) << 16;
#endif
}

/// 16 bytes of a row: 8 bf16 or 4 f32.
template <bool kFloat32>
struct Vector {
  static constexpr int kWidth = kFloat32 ? 4 : 8;
  float values[kWidth];

  __device__ void clear() {
#pragma unroll
    for (float& value : values) value = 0.0F;
  }
  __device__ void add(const uint4& raw, float weight) {
    const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kFloat32) {
        values[i] = __fmaf_rn(weight, __uint_as_float(words[i]), values[i]);
      } else {
        values[2 * i] = __fmaf_rn(weight, __uint_as_float(words[i] << 16), values[2 * i]);
        values[2 * i + 1] = __fmaf_rn(weight, __uint_as_float(words[i] & 0xFFFF0000U), values[2 * i + 1]);
      }
    }
  }
  /// Rounds to nearest-even; NaN becomes the canonical quiet NaN of the type.
  __device__ uint4 round() const {
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kFloat32) {
        words[i] = isnan(values[i]) ? 0x7FFFFFFFU : __float_as_uint(values[i]);
      } else {
        words[i] = round_bfloat16_pair(values[2 * i], values[2 * i + 1]);
      }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
};

/// Loads from a peer's memory without keeping the line in the first-level cache, where it would outlive the call.
__device__ inline uint4 load_row(const std::byte* address) {
#if __CUDA_ARCH__ >= 800
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address)
               : "memory");
  return value;
#else
  return *reinterpret_cast<const uint4*>(address);
#endif
}
__device__ inline uint2 load_row_pair(const std::byte* address) {
#if __CUDA_ARCH__ >= 800
  uint2 value;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "l"(address)
               : "memory");
  return value;
#else
  return *reinterpret_cast<const uint2*>(address);
#endif
}
__device__ inline float load_row_float(const std::byte* address) {
#if __CUDA_ARCH__ >= 800
  float value;
  asm volatile("ld.global.L1::no_allocate.f32 %0, [%1];" : "=f"(value) : "l"(address) : "memory");
  return value;
#else
  return *reinterpret_cast<const float*>(address);
#endif
}

/// Adds the existing rows among [first, first + kRows) of `terms` to kSteps vectors, 512 bytes apart.
template <bool kFloat32, int kRows, int kSteps>
__device__ inline void add_rows(const Terms& terms, int first, int num_rows, std::int64_t offset,
                                std::int64_t row_bytes, Vector<kFloat32> (&sums)[kSteps]) {
  constexpr std::int64_t kStepBytes = kWarpLanes * sizeof(uint4);
  uint4 raw[kRows][kSteps];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::int64_t at = offset + step * kStepBytes;
      if (first + row < num_rows && at < row_bytes) raw[row][step] = load_row(terms.rows[first + row] + at);
    }
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    if (first + row >= num_rows) break;
    for (int i = terms.first_weight[first + row]; i < terms.first_weight[first + row + 1]; ++i) {
      const float weight = terms.weights[i];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (offset + step * kStepBytes < row_bytes) sums[step].add(raw[row][step], weight);
      }
    }
  }
}

/// Writes the sum of all terms to `out`. One warp calls it.
template <bool kFloat32, int kRows, int kSteps>
__device__ inline void sum_row(const Terms& terms, int num_rows, std::byte* out, std::int64_t row_bytes) {
  constexpr std::int64_t kStepBytes = kWarpLanes * sizeof(uint4);
  for (std::int64_t offset = lane_idx() * static_cast<std::int64_t>(sizeof(uint4)); offset < row_bytes;
       offset += kSteps * kStepBytes) {
    Vector<kFloat32> sums[kSteps];
#pragma unroll
    for (Vector<kFloat32>& sum : sums) sum.clear();
    for (int first = 0; first < num_rows; first += kRows) {
      add_rows<kFloat32, kRows, kSteps>(terms, first, num_rows, offset, row_bytes, sums);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::int64_t at = offset + step * kStepBytes;
      if (at < row_bytes) *reinterpret_cast<uint4*>(out + at) = sums[step].round();
    }
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_NUMERIC_ROW_SUM_CUH
