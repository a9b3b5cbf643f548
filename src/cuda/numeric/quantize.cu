/// Quantises and dequantises whole tensors. A warp takes a part of a row at a time and loads all of it before it
/// computes, so that enough loads are in flight to keep the memory busy.

#include "cuda/numeric/quantize.hpp"

#include <algorithm>
#include <type_traits>

#include "cuda/driver/launch.hpp"
#include "cuda/numeric/quantize.cuh"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)
using numeric::QuantizeParams;

constexpr unsigned kMaxThreads = 1024;
/// Blocks of channels that half a warp holds in registers. With four blocks of bf16, a multiprocessor's 32 warps have
/// 64 KiB in flight.
template <bool kIsBfloat16>
constexpr int kUnroll = kIsBfloat16 ? 4 : 2;
template <bool kIsBfloat16>
constexpr int kPartBlocks = kUnroll<kIsBfloat16>* kBlocksPerWarp;

struct KernelParams {
  QuantizeParams quantize;
  std::int64_t parts_per_row = 1;
  /// Each lane can load and store all of its channels at once; otherwise it moves them one by one.
  bool aligned = false;
};

/// Position of a lane's channels of one block.
struct Place {
  std::int64_t row = 0;
  std::int64_t block = 0;
  std::int64_t channel = 0;  ///< first of eight
};

template <bool kIsBfloat16>
__device__ Place place_of(std::int64_t row, std::int64_t part, int step) {
  const std::int64_t block = part * kPartBlocks<kIsBfloat16> + step * kBlocksPerWarp + lane_idx() / kBlockLanes;
  return {row, block, block * kQuantBlockSize + lane_idx() % kBlockLanes * kLaneChannels};
}

/// A lane's channels in their memory format: unpacked they would take twice the registers.
template <bool kIsBfloat16>
struct StoredChannels {
  uint4 words[kIsBfloat16 ? 1 : 2];
};

__device__ LaneChannels unpack(const StoredChannels<true>& stored) { return channels_of_bfloat16(stored.words[0]); }

__device__ LaneChannels unpack(const StoredChannels<false>& stored) {
  const uint4& low = stored.words[0];
  const uint4& high = stored.words[1];
  return {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
}

/// Loads one by one the channels that lie in the row. The others are zero.
__device__ StoredChannels<true> gather(const std::uint16_t* from, std::int64_t num_left) {
  std::uint32_t words[kLaneChannels / 2] = {};
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    if (i < num_left) words[i / 2] |= static_cast<std::uint32_t>(from[i]) << (i % 2 * 16);
  }
  return {{{words[0], words[1], words[2], words[3]}}};
}

__device__ StoredChannels<false> gather(const std::uint32_t* from, std::int64_t num_left) {
  std::uint32_t words[kLaneChannels] = {};
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    if (i < num_left) words[i] = from[i];
  }
  return {{{words[0], words[1], words[2], words[3]}, {words[4], words[5], words[6], words[7]}}};
}

template <bool kIsBfloat16>
__device__ StoredChannels<kIsBfloat16> load_channels(const KernelParams& params, const Place& place) {
  using Element = std::conditional_t<kIsBfloat16, std::uint16_t, std::uint32_t>;
  const QuantizeParams& rows = params.quantize;
  if (place.channel >= rows.hidden) return {};
  const Element* from = static_cast<const Element*>(rows.x) + place.row * rows.x_stride + place.channel;
  if (params.aligned) return *reinterpret_cast<const StoredChannels<kIsBfloat16>*>(from);
  return gather(from, rows.hidden - place.channel);
}

__device__ void store_codes(const KernelParams& params, const Place& place, uint2 codes) {
  const QuantizeParams& rows = params.quantize;
  if (place.channel >= rows.hidden) return;
  std::uint8_t* to = rows.q + place.row * rows.q_stride + place.channel;
  if (params.aligned) {
    *reinterpret_cast<uint2*>(to) = codes;
    return;
  }
  for (int i = 0; i < kLaneChannels; ++i) {
    const std::uint32_t word = i < 4 ? codes.x : codes.y;
    if (place.channel + i < rows.hidden) to[i] = static_cast<std::uint8_t>(word >> (i % 4 * 8));
  }
}

/// Byte of an exponent, as in numeric/quantize.cpp.
__device__ std::byte* exponent_at(const numeric::BlockScales& scales, std::int64_t row, std::int64_t block) {
  if (scales.dtype == DType::kUint8) return scales.data + row * scales.row_stride + block * scales.column_stride;
  const std::int64_t word = row * scales.row_stride + block / numeric::kPackedScales * scales.column_stride;
  return scales.data + word * numeric::kPackedScales + block % numeric::kPackedScales;
}

__device__ float* float_at(const numeric::BlockScales& scales, std::int64_t row, std::int64_t block) {
  return reinterpret_cast<float*>(scales.data) + row * scales.row_stride + block * scales.column_stride;
}

/// Stores a block's scale, from one lane. For the row's last block, also clears the exponents after it.
__device__ void store_scale(const QuantizeParams& rows, const Place& place, const numeric::BlockScale& scale) {
  if (lane_idx() % kBlockLanes != 0) return;
  if (rows.scales.dtype == DType::kFloat32) {
    *float_at(rows.scales, place.row, place.block) = scale.stored;
    return;
  }
  *exponent_at(rows.scales, place.row, place.block) = static_cast<std::byte>(scale.exponent);
  if (rows.scales.dtype != DType::kInt32 || place.block + 1 != numeric::num_blocks(rows.hidden)) return;
  for (std::int64_t spare = place.block + 1; spare % numeric::kPackedScales != 0; ++spare) {
    *exponent_at(rows.scales, place.row, spare) = std::byte{0};
  }
}

__device__ float load_scale(const QuantizeParams& rows, const Place& place) {
  if (rows.scales.dtype == DType::kFloat32) return *float_at(rows.scales, place.row, place.block);
  return numeric::float_from_ue8m0(static_cast<std::uint32_t>(*exponent_at(rows.scales, place.row, place.block)));
}

/// Calls fn(row, part of the row) for each part that this warp takes.
template <typename Function>
__device__ void for_each_part(const KernelParams& params, Function fn) {
  const std::int64_t warps_per_block = blockDim.x / kWarpLanes;
  const std::int64_t num_parts = params.quantize.num_rows * params.parts_per_row;
  for (std::int64_t at = blockIdx.x * warps_per_block + warp_idx(); at < num_parts; at += gridDim.x * warps_per_block) {
    fn(at / params.parts_per_row, at % params.parts_per_row);
  }
}

template <bool kIsInt8, bool kIsBfloat16>
__global__ void __launch_bounds__(kMaxThreads) quantize_kernel(KernelParams params) {
  const QuantizeParams& rows = params.quantize;
  for_each_part(params, [&](std::int64_t row, std::int64_t part) {
    StoredChannels<kIsBfloat16> stored[kUnroll<kIsBfloat16>];
#pragma unroll
    for (int step = 0; step < kUnroll<kIsBfloat16>; ++step) {
      stored[step] = load_channels<kIsBfloat16>(params, place_of<kIsBfloat16>(row, part, step));
    }
#pragma unroll
    for (int step = 0; step < kUnroll<kIsBfloat16>; ++step) {
      const LaneChannels channels = unpack(stored[step]);
      const numeric::BlockScale scale = scale_of_block<kIsInt8>(channels, rows.mode);
      const Place place = place_of<kIsBfloat16>(row, part, step);
      if (place.block >= numeric::num_blocks(rows.hidden)) continue;
      store_codes(params, place, quantize_channels<kIsInt8>(channels, scale));
      store_scale(rows, place, scale);
    }
  });
}

__device__ uint2 load_codes(const KernelParams& params, const Place& place) {
  const QuantizeParams& rows = params.quantize;
  uint2 codes{0, 0};
  if (place.channel >= rows.hidden) return codes;
  const std::uint8_t* from = rows.q + place.row * rows.q_stride + place.channel;
  if (params.aligned) return *reinterpret_cast<const uint2*>(from);
  for (int i = 0; i < kLaneChannels; ++i) {
    if (place.channel + i >= rows.hidden) break;
    (i < 4 ? codes.x : codes.y) |= static_cast<std::uint32_t>(from[i]) << (i % 4 * 8);
  }
  return codes;
}

template <bool kIsInt8, bool kIsBfloat16>
__device__ void store_values(const KernelParams& params, const Place& place, uint2 codes, float scale) {
  const QuantizeParams& rows = params.quantize;
  std::uint32_t words[kLaneChannels];
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    const std::uint32_t code = ((i < 4 ? codes.x : codes.y) >> (i % 4 * 8)) & 0xFFU;
    const float value = value_of_code<kIsInt8>(code) * scale;
    words[i] = kIsBfloat16 ? numeric::bfloat16_from_float(value) : numeric::canonical_float(value);
  }
  const std::int64_t offset = place.row * rows.x_stride + place.channel;
  if (kIsBfloat16) {
    std::uint16_t* to = static_cast<std::uint16_t*>(rows.x) + offset;
    if (params.aligned) {
      *reinterpret_cast<uint4*>(to) = {words[0] | words[1] << 16, words[2] | words[3] << 16, words[4] | words[5] << 16,
                                       words[6] | words[7] << 16};
      return;
    }
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
      if (place.channel + i < rows.hidden) to[i] = static_cast<std::uint16_t>(words[i]);
    }
    return;
  }
  std::uint32_t* to = static_cast<std::uint32_t*>(rows.x) + offset;
  if (params.aligned) {
    reinterpret_cast<uint4*>(to)[0] = {words[0], words[1], words[2], words[3]};
    reinterpret_cast<uint4*>(to)[1] = {words[4], words[5], words[6], words[7]};
    return;
  }
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    if (place.channel + i < rows.hidden) to[i] = words[i];
  }
}

template <bool kIsInt8, bool kIsBfloat16>
__global__ void __launch_bounds__(kMaxThreads) dequantize_kernel(KernelParams params) {
  const QuantizeParams& rows = params.quantize;
  for_each_part(params, [&](std::int64_t row, std::int64_t part) {
    uint2 codes[kUnroll<kIsBfloat16>];
    float scales[kUnroll<kIsBfloat16>] = {};
#pragma unroll
    for (int step = 0; step < kUnroll<kIsBfloat16>; ++step) {
      const Place place = place_of<kIsBfloat16>(row, part, step);
      codes[step] = load_codes(params, place);
      if (place.channel < rows.hidden) scales[step] = load_scale(rows, place);
    }
#pragma unroll
    for (int step = 0; step < kUnroll<kIsBfloat16>; ++step) {
      const Place place = place_of<kIsBfloat16>(row, part, step);
      if (place.channel < rows.hidden) {
        store_values<kIsInt8, kIsBfloat16>(params, place, codes[step], scales[step]);
      }
    }
  });
}

bool is_aligned(const QuantizeParams& params) {
  const auto element_bytes = static_cast<std::int64_t>(size_bytes(params.x_dtype));
  const auto divides = [](const void* data, std::int64_t stride_bytes, std::int64_t bytes) {
    return reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(bytes) == 0 &&
           stride_bytes % bytes == 0;
  };
  return params.hidden % kLaneChannels == 0 &&
         divides(params.x, params.x_stride * element_bytes, static_cast<std::int64_t>(sizeof(uint4))) &&
         divides(params.q, params.q_stride, static_cast<std::int64_t>(sizeof(uint2)));
}

using Kernel = void (*)(KernelParams);

Kernel choose(bool is_int8, bool is_bfloat16, const Kernel (&kernels)[2][2]) { return kernels[is_int8][is_bfloat16]; }

constexpr Kernel kQuantizeKernels[2][2] = {{quantize_kernel<false, false>, quantize_kernel<false, true>},
                                           {quantize_kernel<true, false>, quantize_kernel<true, true>}};
constexpr Kernel kDequantizeKernels[2][2] = {{dequantize_kernel<false, false>, dequantize_kernel<false, true>},
                                             {dequantize_kernel<true, false>, dequantize_kernel<true, true>}};

cudaError_t launch(const QuantizeParams& rows, int num_sms, cudaStream_t stream, const Kernel (&kernels)[2][2]) {
  KernelParams params;
  params.quantize = rows;
  const std::int64_t part_blocks = rows.x_dtype == DType::kBfloat16 ? kPartBlocks<true> : kPartBlocks<false>;
  params.parts_per_row = (numeric::num_blocks(rows.hidden) + part_blocks - 1) / part_blocks;
  params.aligned = is_aligned(rows);
  const std::int64_t num_parts = rows.num_rows * params.parts_per_row;
  if (num_parts == 0) return cudaSuccess;
  // One block per multiprocessor, with as many warps as there is work for.
  constexpr std::int64_t kMaxWarps = kMaxThreads / kWarpLanes;
  const std::int64_t num_warps = std::min<std::int64_t>((num_parts + num_sms - 1) / num_sms, kMaxWarps);
  const std::int64_t num_blocks = std::min<std::int64_t>((num_parts + num_warps - 1) / num_warps, num_sms);
  const LaunchShape shape{static_cast<unsigned>(num_blocks), static_cast<unsigned>(num_warps * kWarpLanes)};
  return launch_kernel(choose(rows.mode == Quantization::kInt8, rows.x_dtype == DType::kBfloat16, kernels), shape,
                       params, stream);
}

}  // namespace

cudaError_t launch_quantize(const QuantizeParams& params, int num_sms, cudaStream_t stream) {
  return launch(params, num_sms, stream, kQuantizeKernels);
}

cudaError_t launch_dequantize(const QuantizeParams& params, int num_sms, cudaStream_t stream) {
  return launch(params, num_sms, stream, kDequantizeKernels);
}

cudaError_t load_quantize_kernels() {
  for (const auto& kernels : kQuantizeKernels) {
    for (const Kernel kernel : kernels) {
      cudaFuncAttributes attributes;
      const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda
