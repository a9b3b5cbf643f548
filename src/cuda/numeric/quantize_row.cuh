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

#if __CUDA_ARCH__ >= 890
/// Whether e4m3_codes_of_signed() and max_magnitude_pair() are instructions.
inline constexpr bool kEncodesSigned = true;

/// Larger of the two magnitudes in each half, with any sign; NaN if there is one. (PTX ISA, max; sm_86 and later.)
__device__ inline std::uint32_t max_magnitude_pair(std::uint32_t a, std::uint32_t b) {
  std::uint32_t pair;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}

/// Codes of four values, the first in the low byte, as encode_e4m3_pair makes them. No value is NaN: the instruction
/// gives each NaN one code, without its sign.
__device__ inline std::uint32_t e4m3_codes_of_signed(float a, float b, float c, float d) {
  std::uint32_t codes;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(codes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return codes;
}
#else
inline constexpr bool kEncodesSigned = false;
__device__ inline std::uint32_t max_magnitude_pair(std::uint32_t a, std::uint32_t /*b*/) { return a; }
__device__ inline std::uint32_t e4m3_codes_of_signed(float /*a*/, float /*b*/, float /*c*/, float /*d*/) { return 0; }
#endif

/// Sixteen consecutive channels, as they are in memory.
template <bool kFloat32>
struct RowChannels {
  static constexpr int kVectors = kFloat32 ? 4 : 2;
  static constexpr int kChannelsPerWord = kFloat32 ? 1 : 2;
  std::uint32_t words[kRowLaneChannels / kChannelsPerWord];

  static constexpr bool kMayBeRegular = !kFloat32 && kEncodesSigned;

  /// Bits of the largest magnitude, as an f32; at least infinity if a channel is not finite. With kMayBeRegular.
  __device__ std::uint32_t regular_amax() const {
    std::uint32_t pair = words[0];
#pragma unroll
    for (const std::uint32_t word : words) pair = max_magnitude_pair(pair, word);
    pair &= 0x7FFF7FFFU;
    return max(pair << 16, pair & 0xFFFF0000U);
  }

  /// The same; a NaN counts as none.
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

  /// Codes of channels 4 * idx to 4 * idx + 3, the first in the low byte. `kRegular`: all are finite.
  template <bool kRegular>
  __device__ std::uint32_t codes(int idx, float multiplier) const {
    if constexpr (kRegular) {
      const std::uint32_t low = words[2 * idx];
      const std::uint32_t high = words[2 * idx + 1];
      const auto scaled = [multiplier](std::uint32_t bits) { return numeric::float_of(bits) * multiplier; };
      return e4m3_codes_of_signed(scaled(low << 16), scaled(low & 0xFFFF0000U), scaled(high << 16),
                                  scaled(high & 0xFFFF0000U));
    } else if constexpr (kFloat32) {
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

/// Blocks of a row that a warp quantises together.
template <bool kFloat32>
class BlocksAtOnce {
  using Channels = RowChannels<kFloat32>;

 public:
  /// Blocks of one lane whose loads are under way at once, and whose scales are computed at once.
  static constexpr int kSteps = kFloat32 ? 2 : 4;
  static constexpr int kBlocks = kSteps * kBlocksAbreast;

  /// Loads blocks `base` to `base + kBlocks`, as far as they are before `end`. `first`: the block that `load` counts
  /// from.
  template <typename Load>
  __device__ BlocksAtOnce(Load load, int first, int base, int end) : base_(base), end_(end) {
    constexpr int kLaneBytes = Channels::kVectors * static_cast<int>(sizeof(uint4));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int block = block_of(step);
      const int offset = ((block - first) * kRowBlockLanes + lane_) * kLaneBytes;
#pragma unroll
      for (int i = 0; i < Channels::kVectors; ++i) {
        const int vector = (i + turn_) % Channels::kVectors;
        uint4 loaded{};
        if (block < end) loaded = load(offset + vector * static_cast<int>(sizeof(uint4)));
        const std::uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
        for (int word = 0; word < 4; ++word) channels_[step].words[4 * i + word] = words[word];
      }
    }
  }

  __device__ void quantize(std::byte* wire) const {
    if constexpr (Channels::kMayBeRegular) {
      std::uint32_t amax[kSteps];
      std::uint32_t largest = 0;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        amax[step] = channels_[step].regular_amax();
        largest = max(largest, amax[step]);
      }
      if (__all_sync(kAllLanes, static_cast<int>(largest < numeric::kFloatInfinity)) != 0) [[likely]] {
        store<true>(amax, wire);
        return;
      }
    }
    std::uint32_t amax[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) amax[step] = channels_[step].amax();
    store<false>(amax, wire);
  }

 private:
  __device__ int block_of(int step) const { return base_ + step * kBlocksAbreast + beside_; }

  /// Stores scales and codes. `amax`: this lane's, of each step.
  template <bool kRegular>
  __device__ void store(const std::uint32_t (&amax)[kSteps], std::byte* wire) const {
    // Lane s of the block's eight makes the scale of step s.
    std::uint32_t own_amax = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t of_block = amax[step];
#pragma unroll
      for (int distance = kRowBlockLanes / 2; distance > 0; distance /= 2) {
        of_block = max(of_block, __shfl_xor_sync(kAllLanes, of_block, distance));
      }
      if (lane_ == step) own_amax = of_block;
    }
    const numeric::BlockScale scale =
        numeric::make_scale(max(own_amax, numeric::bits_of(kQuantAmaxFloor)), Quantization::kFp8);
    const int own_block = block_of(lane_);
    if (lane_ < kSteps && own_block < end_) {
      *reinterpret_cast<float*>(wire + block_scale_at(own_block)) = scale.stored;
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const float multiplier = __shfl_sync(kAllLanes, scale.multiplier, beside_ * kRowBlockLanes + step);
      const int block = block_of(step);
      std::uint32_t codes[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) codes[i] = channels_[step].template codes<kRegular>(i, multiplier);
      if (block < end_) {
        *reinterpret_cast<uint4*>(wire + block_codes_at(block) + lane_ * kRowLaneChannels) =
            in_order<kFloat32>(codes, turn_);
      }
    }
  }

  const int base_;
  const int end_;
  const int lane_ = lane_idx() % kRowBlockLanes;    ///< of a block
  const int beside_ = lane_idx() / kRowBlockLanes;  ///< block of the warp
  /// Lanes whose loads are served together begin with different vectors, and so read different banks of shared memory.
  const int turn_ = lane_ / (kRowBlockLanes / Channels::kVectors);
  Channels channels_[kSteps];
};

/// Quantises blocks `first` to `end` of a row to `wire`, the start of the row there. `load(offset)` returns 16 bytes of
/// the row at `offset` bytes from block `first`. All lanes of a warp call it.
template <bool kFloat32, typename Load>
__device__ inline void quantize_blocks(Load load, int first, int end, std::byte* wire) {
  using Blocks = BlocksAtOnce<kFloat32>;
#pragma unroll 1
  for (int base = first; base < end; base += Blocks::kBlocks) Blocks(load, first, base, end).quantize(wire);
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_NUMERIC_QUANTIZE_ROW_CUH
