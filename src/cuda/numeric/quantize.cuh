#ifndef FERRY_CUDA_NUMERIC_QUANTIZE_CUH
#define FERRY_CUDA_NUMERIC_QUANTIZE_CUH

/// Blocks of 128 channels on a GPU: half a warp holds a block, and a lane eight consecutive channels of it. The results
/// have the same bits as on the host, whose arithmetic is shared (numeric/block_codec.hpp). Uses registers only, so
/// that kernels can quantise rows as they move them.

#include <cstdint>

#include "cuda/sync/flags.cuh"
#include "numeric/block_codec.hpp"

namespace ferry::cuda::device {

inline constexpr int kLaneChannels = 8;
inline constexpr int kBlockLanes = 16;  // kQuantBlockSize / kLaneChannels
inline constexpr int kBlocksPerWarp = kWarpLanes / kBlockLanes;

/// Bits of eight f32 values.
struct LaneChannels {
  std::uint32_t bits[kLaneChannels];
};

/// Unpacks eight bf16 values from 16 bytes of memory.
__device__ inline LaneChannels channels_of_bfloat16(uint4 packed) {
  const std::uint32_t words[] = {packed.x, packed.y, packed.z, packed.w};
  LaneChannels channels;
#pragma unroll
  for (int i = 0; i < kLaneChannels / 2; ++i) {
    channels.bits[2 * i] = words[i] << 16;
    channels.bits[2 * i + 1] = words[i] & 0xFFFF0000U;
  }
  return channels;
}

/// Bits of the largest magnitude of a block, at least the floor that a scale is made from. All lanes of the warp call
/// it; each gets that of its half. Lanes past the end of a row pass zeros.
template <bool kIsInt8>
__device__ std::uint32_t amax_of_block(const LaneChannels& channels) {
  std::uint32_t amax = numeric::bits_of(kQuantAmaxFloor);
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    amax = max(amax, numeric::amax_candidate(channels.bits[i] & numeric::kFloatMagnitude, kIsInt8));
  }
#pragma unroll
  for (int distance = kBlockLanes / 2; distance > 0; distance /= 2) {
    amax = max(amax, __shfl_xor_sync(kAllLanes, amax, distance));
  }
  return amax;
}

/// Scale of a block from its channels, as amax_of_block().
template <bool kIsInt8>
__device__ numeric::BlockScale scale_of_block(const LaneChannels& channels, Quantization mode) {
  return numeric::make_scale(amax_of_block<kIsInt8>(channels), mode);
}

/// E4M3 codes of two magnitudes, the first in the low byte.
__device__ inline std::uint32_t encode_e4m3_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
  // Rounds to nearest-even and saturates as numeric::encode_e4m3 does. (PTX ISA, cvt; sm_89 and later.)
  std::uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  constexpr std::uint32_t kMagnitudes = numeric::kFp8Magnitude | numeric::kFp8Magnitude << 8;
  return codes & kMagnitudes;
#else
  return numeric::encode_e4m3(numeric::bits_of(low) & numeric::kFloatMagnitude) |
         numeric::encode_e4m3(numeric::bits_of(high) & numeric::kFloatMagnitude) << 8;
#endif
}

__device__ inline std::uint32_t quantize_e4m3_pair(std::uint32_t low, std::uint32_t high, float multiplier) {
  const std::uint32_t codes = encode_e4m3_pair(numeric::float_of(low & numeric::kFloatMagnitude) * multiplier,
                                               numeric::float_of(high & numeric::kFloatMagnitude) * multiplier);
  return codes | (low >> 31) << 7 | (high >> 31) << 15;
}

/// Codes of a lane's eight channels, the first in the low byte of x.
template <bool kIsInt8>
__device__ uint2 quantize_channels(const LaneChannels& channels, const numeric::BlockScale& scale) {
  std::uint32_t words[2] = {0, 0};
  if (kIsInt8) {
    if (scale.blank) return {0, 0};
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
      const std::uint32_t code = numeric::quantize_int8(channels.bits[i], scale.multiplier);
      words[i / 4] |= code << (i % 4 * 8);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kLaneChannels; i += 2) {
      const std::uint32_t codes = quantize_e4m3_pair(channels.bits[i], channels.bits[i + 1], scale.multiplier);
      words[i / 4] |= codes << (i % 4 * 8);
    }
  }
  return {words[0], words[1]};
}

/// Values of two E4M3 codes, the first in the low byte.
__device__ inline float2 values_of_e4m3_pair(std::uint32_t codes) {
#if __CUDA_ARCH__ >= 890
  float2 values;
  // PTX ISA, cvt (e4m3x2: sm_89 and later). Every E4M3 value is an f16, and every f16 is an f32.
  asm("{\n"
      "  .reg .b32 pair;\n"
      "  .reg .b16 low, high;\n"
      "  cvt.rn.f16x2.e4m3x2 pair, %2;\n"
      "  mov.b32 {low, high}, pair;\n"
      "  cvt.f32.f16 %0, low;\n"
      "  cvt.f32.f16 %1, high;\n"
      "}\n"
      : "=f"(values.x), "=f"(values.y)
      : "h"(static_cast<std::uint16_t>(codes)));
  return values;
#else
  return {numeric::decode_e4m3(codes & 0xFFU), numeric::decode_e4m3(codes >> 8 & 0xFFU)};
#endif
}

/// Value of a code before scaling.
template <bool kIsInt8>
__device__ float value_of_code(std::uint32_t code) {
  return kIsInt8 ? static_cast<float>(static_cast<std::int8_t>(code)) : numeric::decode_e4m3(code);
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_NUMERIC_QUANTIZE_CUH
