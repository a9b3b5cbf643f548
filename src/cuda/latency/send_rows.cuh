#ifndef FERRY_CUDA_LATENCY_SEND_ROWS_CUH
#define FERRY_CUDA_LATENCY_SEND_ROWS_CUH

/// One row of x to every rank that gets it, by all threads of a block: read once, stored to each.

#include <cstddef>
#include <cstdint>

#include "cuda/latency/words.cuh"
#include "cuda/numeric/quantize.cuh"
#include "ferry/routing.hpp"
#include "numeric/quantize.hpp"

namespace ferry::cuda::device {

/// Blocks of channels whose scales a block of threads collects before it stores them: rows of up to 64 Ki channels in
/// one go.
inline constexpr int kTileBlocks = 512;
/// Loads of a thread that are on their way together. A block of 512 threads has 14 KiB of bf16 in two.
inline constexpr int kSendUnroll = 2;

/// Where a row goes. In shared memory.
struct RowTargets {
  int num = 0;
  std::byte* rows[kMaxTopk];
};

template <typename Word>
__device__ inline void store_to_all(const RowTargets& targets, std::int64_t offset, const Word& word) {
#pragma unroll 1
  for (int i = 0; i < targets.num; ++i) *reinterpret_cast<Word*>(targets.rows[i] + offset) = word;
}

/// A row as it is, and its scales.
__device__ inline void send_plain_row(const DispatchSendParams& params, std::int64_t token, const RowTargets& targets) {
  const int num_threads = static_cast<int>(blockDim.x);
  const auto thread = static_cast<int>(threadIdx.x);
  const auto* from = reinterpret_cast<const uint4*>(params.x + token * params.x_stride);
  const std::int64_t count = params.row.x_bytes / static_cast<std::int64_t>(sizeof(uint4));
#pragma unroll 1
  for (std::int64_t first = thread; first < count; first += kSendUnroll * num_threads) {
    uint4 values[kSendUnroll];
#pragma unroll
    for (int i = 0; i < kSendUnroll; ++i) {
      if (first + i * num_threads < count) values[i] = from[first + i * num_threads];
    }
#pragma unroll
    for (int i = 0; i < kSendUnroll; ++i) {
      const std::int64_t at = first + i * num_threads;
      if (at < count) store_to_all(targets, at * static_cast<std::int64_t>(sizeof(uint4)), values[i]);
    }
  }
  const ConstScales& scales = params.scales;
#pragma unroll 1
  for (int column = thread; column < params.row.num_scales; column += num_threads) {
    const std::int64_t at = token * scales.row_stride + column * scales.column_stride;
    const std::int64_t to = params.row.scales_offset() + std::int64_t{column} * params.row.scale_bytes;
    if (params.row.scale_bytes == sizeof(std::uint32_t)) {
      store_to_all(targets, to, reinterpret_cast<const std::uint32_t*>(scales.data)[at]);
    } else {
      store_to_all(targets, to, scales.data[at]);
    }
  }
}

/// A row of bf16 as codes and scales. `scale_words` [kTileBlocks] is in shared memory.
template <bool kIsInt8>
__device__ inline void send_quantized_row(const DispatchSendParams& params, std::int64_t token,
                                          const RowTargets& targets, std::uint32_t* scale_words) {
  const int num_warps = static_cast<int>(blockDim.x) / kWarpLanes;
  const auto thread = static_cast<int>(threadIdx.x);
  const bool exponents = params.quantize == Quantization::kFp8Ue8m0;
  const std::byte* const from = params.x + token * params.x_stride;
  const std::int64_t num_blocks = numeric::num_blocks(params.hidden);
#pragma unroll 1
  for (std::int64_t tile = 0; tile < num_blocks; tile += kTileBlocks) {
    const int tile_blocks = static_cast<int>(num_blocks - tile < kTileBlocks ? num_blocks - tile : kTileBlocks);
    constexpr int kExponents = sizeof(std::uint32_t);
    const int num_words = exponents ? (tile_blocks + kExponents - 1) / kExponents : tile_blocks;
    // Exponents of no block are 0.
#pragma unroll 1
    for (int word = thread; word < num_words; word += static_cast<int>(blockDim.x)) scale_words[word] = 0;
    __syncthreads();
    const int num_steps = (tile_blocks + kBlocksPerWarp - 1) / kBlocksPerWarp;
#pragma unroll 1
    for (int first = warp_idx(); first < num_steps; first += kSendUnroll * num_warps) {
      uint4 stored[kSendUnroll];
#pragma unroll
      for (int i = 0; i < kSendUnroll; ++i) {
        const int block = (first + i * num_warps) * kBlocksPerWarp + lane_idx() / kBlockLanes;
        const std::int64_t channel = (tile + block) * kQuantBlockSize + lane_idx() % kBlockLanes * kLaneChannels;
        stored[i] = channel < params.hidden
                        ? *reinterpret_cast<const uint4*>(from + channel * static_cast<int>(sizeof(std::uint16_t)))
                        : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < kSendUnroll; ++i) {
        const int block = (first + i * num_warps) * kBlocksPerWarp + lane_idx() / kBlockLanes;
        const std::int64_t channel = (tile + block) * kQuantBlockSize + lane_idx() % kBlockLanes * kLaneChannels;
        const LaneChannels channels = channels_of_bfloat16(stored[i]);
        const numeric::BlockScale scale = scale_of_block<kIsInt8>(channels, params.quantize);
        if (channel < params.hidden) store_to_all(targets, channel, quantize_channels<kIsInt8>(channels, scale));
        if (lane_idx() % kBlockLanes != 0 || block >= tile_blocks) continue;
        if (exponents) {
          reinterpret_cast<std::uint8_t*>(scale_words)[block] = scale.exponent;
        } else {
          scale_words[block] = numeric::bits_of(scale.stored);
        }
      }
    }
    __syncthreads();
    const std::int64_t scale_bytes = exponents ? 1 : static_cast<std::int64_t>(sizeof(std::uint32_t));
    const std::int64_t to = params.row.scales_offset() + tile * scale_bytes;
#pragma unroll 1
    for (int word = thread; word < num_words; word += static_cast<int>(blockDim.x)) {
      store_to_all(targets, to + word * static_cast<int>(sizeof(std::uint32_t)), scale_words[word]);
    }
    if (tile + kTileBlocks < num_blocks) __syncthreads();
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_SEND_ROWS_CUH
