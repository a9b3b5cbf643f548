#ifndef FERRY_CUDA_NUMERIC_WIRE_SUM_CUH
#define FERRY_CUDA_NUMERIC_WIRE_SUM_CUH

/// Sums of rows in the wire format of combine (numeric/wire_row.hpp): a term is q * scale, rounded to f32, times its
/// weight.

#include <cstddef>
#include <cstdint>

#include "cuda/numeric/quantize.cuh"
#include "cuda/numeric/row_sum.cuh"
#include "cuda/numeric/wire_row.hpp"

namespace ferry::cuda::device {

/// Sums of eight consecutive channels.
template <bool kFloat32>
struct ChannelSums {
  static constexpr int kChannels = 8;
  static constexpr int kElementBytes = kFloat32 ? 4 : 2;
  static constexpr int kVectors = kChannels / Vector<kFloat32>::kWidth;
  Vector<kFloat32> vectors[kVectors];

  __device__ void clear() {
#pragma unroll
    for (Vector<kFloat32>& vector : vectors) vector.clear();
  }

  /// Adds the token's biases. `at`: offset of the channels in a row of the output's dtype.
  __device__ void add_biases(const BiasRows (&biases)[kMaxBiases], std::int64_t token, std::int64_t at) {
#pragma unroll
    for (const BiasRows& bias : biases) {
      if (bias.data == nullptr) continue;
      const auto* from = reinterpret_cast<const uint4*>(bias.data + token * bias.stride + at);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) vectors[i].add(from[i], 1.0F);  // fma(1, b, acc) is acc + b
    }
  }

  __device__ void add(uint2 codes, float scale, float weight) {
#pragma unroll
    for (int pair = 0; pair < kChannels / 2; ++pair) {
      const float2 values = values_of_e4m3_pair((pair < 2 ? codes.x : codes.y) >> (pair % 2 * 16) & 0xFFFFU);
      add(2 * pair, __fmul_rn(values.x, scale), weight);
      add(2 * pair + 1, __fmul_rn(values.y, scale), weight);
    }
  }

  __device__ void store(std::byte* to) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) reinterpret_cast<uint4*>(to)[i] = vectors[i].round();
  }

 private:
  __device__ void add(int channel, float term, float weight) {
    float& sum = vectors[channel / Vector<kFloat32>::kWidth].values[channel % Vector<kFloat32>::kWidth];
    sum = __fmaf_rn(weight, term, sum);
  }
};

/// Output of sum_wire_row.
struct SummedRow {
  std::int64_t token = 0;
  std::byte* to = nullptr;
  int num_channels = 0;
};

/// Writes the sum of a token's biases and of all terms, by loads. A lane takes 16 channels of a group. One warp calls
/// it.
template <bool kFloat32>
__device__ inline void sum_wire_row(const Terms& terms, int num_rows, const BiasRows (&biases)[kMaxBiases],
                                    const SummedRow& out) {
  using Sums = ChannelSums<kFloat32>;
  constexpr int kHalves = 2;
  const int lane_channel = lane_idx() * kHalves * Sums::kChannels;
#pragma unroll 1
  for (int group = 0; group * kGroupChannels + lane_channel < out.num_channels; ++group) {
    const std::int64_t channel = group * kGroupChannels + lane_channel;
    Sums sums[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      sums[half].clear();
      sums[half].add_biases(biases, out.token, (channel + half * Sums::kChannels) * Sums::kElementBytes);
    }
#pragma unroll 1
    for (int row = 0; row < num_rows; ++row) {
      const std::byte* from = terms.rows[row] + static_cast<std::int64_t>(group) * kGroupBytes;
      const uint4 codes = load_row(from + lane_channel);
      const uint4 scales = load_row(from + kGroupScalesAt);
      const int block = lane_channel / static_cast<int>(kQuantBlockSize);
      const std::uint32_t bits = block < 2 ? (block == 0 ? scales.x : scales.y) : (block == 2 ? scales.z : scales.w);
#pragma unroll 1
      for (int i = terms.first_weight[row]; i < terms.first_weight[row + 1]; ++i) {
        sums[0].add(uint2{codes.x, codes.y}, __uint_as_float(bits), terms.weights[i]);
        sums[1].add(uint2{codes.z, codes.w}, __uint_as_float(bits), terms.weights[i]);
      }
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      sums[half].store(out.to + (channel + half * Sums::kChannels) * Sums::kElementBytes);
    }
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_NUMERIC_WIRE_SUM_CUH
