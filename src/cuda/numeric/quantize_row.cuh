#ifndef FERRY_CUDA_NUMERIC_QUANTIZE_ROW_CUH
#define FERRY_CUDA_NUMERIC_QUANTIZE_ROW_CUH

/// Quantises parts of rows to the wire format of combine (numeric/wire_row.hpp), with the bits of quantize_fp8. Eight
/// lanes hold a block of 128 channels, so that a lane stores 16 bytes of codes; the scales of several blocks are
/// computed at once, each by one lane, because a division costs as much as the rest of a lane's work on its channels.

#include <cstddef>
#include <cstdint>

#include "cuda/numeric/quantize.cuh"
#include "cuda/numeric/wire_row.hpp"
#include "cuda/sync/flags.cuh"

namespace ferry::cuda::device {

/// Lanes of a block, and channels of one lane.
inline constexpr int kRowBlockLanes = 8;
inline constexpr int kRowLaneChannels = static_cast<int>(kQuantBlockSize) / kRowBlockLanes;
/// Blocks that a warp quantises side by side.
inline constexpr int kBlocksAbreast = kWarpLanes / kRowBlockLanes;

/// Larger of the two magnitudes in each half, bf16 without sign; a NaN in `b` counts as none. `a` is no NaN.
__device__ inline std::uint32_t max_bfloat16_pair(std::uint32_t a, std::uint32_t b) {
#if __CUDA_ARCH__ >= 800
  std::uint32_t pair;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));  // PTX ISA, max: of a number and a NaN, the number
  return pair;
#else
  const std::uint32_t low = max(a << 16, numeric::amax_candidate(b << 16, false));
  return max(a & 0xFFFF0000U, numeric::amax_candidate(b & 0xFFFF0000U, false)) | low >> 16;
#endif
}

/// Sixteen consecutive channels, as they are in memory.
template <bool kFloat32>
struct RowChannels {
  static constexpr int kVectors = kFloat32 ? 4 : 2;
  static constexpr int kChannelsPerWord = kFloat32 ? 1 : 2;
  std::uint32_t words[kRowLaneChannels / kChannelsPerWord];

  /// Bits of the largest magnitude, as an f32.
  __device__ std::uint32_t amax() const {
    std::uint32_t largest = 0;
#pragma unroll
    for (const std::uint32_t word : words) {
      if constexpr (kFloat32) {
        largest = max(largest, numeric::amax_candidate(word & numeric::kFloatMagnitude, false));
      } else {
        largest = max_bfloat16_pair(largest, word & 0x7FFF7FFFU);
      }
    }
    return kFloat32 ? largest : max(largest << 16, largest & 0xFFFF0000U);
  }

  /// Codes of channels 4 * idx to 4 * idx + 3, the first in the low byte.
  __device__ std::uint32_t codes(int idx, float multiplier) const {
    if constexpr (kFloat32) {
      return quantize_e4m3_pair(words[4 * idx], words[4 * idx + 1], multiplier) |
             quantize_e4m3_pair(words[4 * idx + 2], words[4 * idx + 3], multiplier) << 16;
    } else {
      const std::uint32_t low = words[2 * idx];
      const std::uint32_t high = words[2 * idx + 1];
      const auto scaled = [multiplier](std::uint32_t bits) { return numeric::float_of(bits) * multiplier; };
      const std::uint32_t magnitudes = encode_e4m3_pair(scaled(low << 16), scaled(low & 0xFFFF0000U)) |
                                       encode_e4m3_pair(scaled(high << 16), scaled(high & 0xFFFF0000U)) << 16;
      constexpr unsigned kHighBytes = 0x7531;  // of the four channels
      return magnitudes | (__byte_perm(low, high, kHighBytes) & 0x80808080U);
    }
  }
};

/// Codes of a lane whose vectors were loaded in turn, from vector `turn` on.
template <bool kFloat32>
__device__ inline uint4 in_order(const std::uint32_t (&codes)[4], int turn) {
  uint4 ordered{codes[0], codes[1], codes[2], codes[3]};
  if (kFloat32 && (turn & 1) != 0) ordered = {ordered.w, ordered.x, ordered.y, ordered.z};
  const bool swaps = (turn & (kFloat32 ? 2 : 1)) != 0;
  return swaps ? uint4{ordered.z, ordered.w, ordered.x, ordered.y} : ordered;
}

/// Quantises blocks `first` to `end` of a row to `wire`, the start of the row there. `load(offset)` returns 16 bytes of
/// the row at `offset` bytes from block `first`. All lanes of a warp call it.
template <bool kFloat32, typename Load>
__device__ inline void quantize_blocks(Load load, int first, int end, std::byte* wire) {
  using Channels = RowChannels<kFloat32>;
  // Blocks of one lane whose loads are under way at once, and whose scales are computed at once.
  constexpr int kSteps = kFloat32 ? 2 : 4;
  constexpr int kLaneBytes = Channels::kVectors * static_cast<int>(sizeof(uint4));
  const int lane = lane_idx() % kRowBlockLanes;
  // Lanes whose loads are served together begin with different vectors, and so read different banks of shared memory.
  const int turn = lane / (kRowBlockLanes / Channels::kVectors);
  const int beside = lane_idx() / kRowBlockLanes;
#pragma unroll 1
  for (int base = first; base < end; base += kSteps * kBlocksAbreast) {
    Channels channels[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int block = base + step * kBlocksAbreast + beside;
      const int offset = ((block - first) * kRowBlockLanes + lane) * kLaneBytes;
#pragma unroll
      for (int i = 0; i < Channels::kVectors; ++i) {
        const int vector = (i + turn) % Channels::kVectors;
        uint4 loaded{};
        if (block < end) loaded = load(offset + vector * static_cast<int>(sizeof(uint4)));
        const std::uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
        for (int word = 0; word < 4; ++word) channels[step].words[4 * i + word] = words[word];
      }
    }
    // Lane s of the block's eight makes the scale of step s.
    std::uint32_t own_amax = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t amax = channels[step].amax();
#pragma unroll
      for (int distance = kRowBlockLanes / 2; distance > 0; distance /= 2) {
        amax = max(amax, __shfl_xor_sync(kAllLanes, amax, distance));
      }
      if (lane == step) own_amax = amax;
    }
    const numeric::BlockScale scale =
        numeric::make_scale(max(own_amax, numeric::bits_of(kQuantAmaxFloor)), Quantization::kFp8);
    const int own_block = base + lane * kBlocksAbreast + beside;
    if (lane < kSteps && own_block < end) {
      *reinterpret_cast<float*>(wire + block_scale_at(own_block)) = scale.stored;
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const float multiplier = __shfl_sync(kAllLanes, scale.multiplier, beside * kRowBlockLanes + step);
      const int block = base + step * kBlocksAbreast + beside;
      std::uint32_t codes[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) codes[i] = channels[step].codes(i, multiplier);
      if (block < end) {
        *reinterpret_cast<uint4*>(wire + block_codes_at(block) + lane * kRowLaneChannels) =
            in_order<kFloat32>(codes, turn);
      }
    }
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_NUMERIC_QUANTIZE_ROW_CUH
