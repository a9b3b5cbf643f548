/// Rows by token copied to their slots, and slots summed. A warp takes a piece of a row, so that few rows fill a GPU
/// too; a row that is copied is read once.

#include "cuda/local/expansion.hpp"

#include <algorithm>

#include "cuda/driver/launch.hpp"
#include "cuda/numeric/row_sum.cuh"
#include "cuda/sync/flags.cuh"

namespace ferry::cuda {
namespace {

using device::kAllLanes;
using device::kWarpLanes;
using device::lane_idx;
using device::warp_idx;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpLanes;
/// Blocks that a multiprocessor holds at once.
constexpr std::int64_t kBlocksPerSm = 8;
constexpr std::int64_t kVectorBytes = sizeof(uint4);
/// Vectors of a row that a lane copies, or sums, at a time.
constexpr int kCopySteps = 4;
constexpr int kSumSteps = 2;
/// Rows that are loaded before the first is added.
constexpr int kRowsAtOnce = 4;

__host__ __device__ constexpr std::int64_t num_pieces(std::int64_t row_bytes, int steps) {
  const std::int64_t piece_bytes = steps * kWarpLanes * kVectorBytes;
  return (row_bytes + piece_bytes - 1) / piece_bytes;
}

/// Of a lane: its choice's slot, -1 where there is none.
__device__ std::int32_t slot_of_lane(const plan::SlotTable& table, std::int64_t row) {
  return lane_idx() < table.num_topk ? table.slot(row, lane_idx()) : -1;
}

/// The lowest of the bits that are left, which loses it.
__device__ int take_lowest(unsigned& left) {
  const int lowest = __ffs(static_cast<int>(left)) - 1;
  left &= left - 1;
  return lowest;
}

__device__ void expand_piece(const plan::ExpandParams& params, std::int64_t row, std::int64_t piece) {
  const std::int32_t slot = slot_of_lane(params.table, row);
  const unsigned named = __ballot_sync(kAllLanes, slot >= 0);
  if (named == 0) return;
  const std::int64_t first = (piece * kCopySteps * kWarpLanes + lane_idx()) * kVectorBytes;
  uint4 raw[kCopySteps];
#pragma unroll
  for (int step = 0; step < kCopySteps; ++step) {
    const std::int64_t at = first + step * kWarpLanes * kVectorBytes;
    if (at < params.row_bytes) raw[step] = *reinterpret_cast<const uint4*>(params.x + row * params.row_bytes + at);
  }
  for (unsigned left = named; left != 0;) {
    const std::int64_t to = __shfl_sync(kAllLanes, slot, take_lowest(left));
    std::byte* const out = params.out_x + to * params.row_bytes;
#pragma unroll
    for (int step = 0; step < kCopySteps; ++step) {
      const std::int64_t at = first + step * kWarpLanes * kVectorBytes;
      if (at < params.row_bytes) *reinterpret_cast<uint4*>(out + at) = raw[step];
    }
    for (std::int64_t i = lane_idx(); piece == 0 && i < params.num_scales; i += kWarpLanes) {
      params.out_scales.at(to, i) = params.scales.at(row, i);
    }
  }
  if (piece == 0 && params.out_weights != nullptr && slot >= 0) {
    params.out_weights[slot] = params.slot_weight(row, lane_idx());
  }
}

__device__ void clear_piece(const plan::ExpandParams& params, std::int64_t slot, std::int64_t piece) {
  if (params.row_of_slot[slot] >= 0) return;
  std::byte* const out = params.out_x + slot * params.row_bytes;
#pragma unroll
  for (int step = 0; step < kCopySteps; ++step) {
    const std::int64_t at = ((piece * kCopySteps + step) * kWarpLanes + lane_idx()) * kVectorBytes;
    if (at < params.row_bytes) *reinterpret_cast<uint4*>(out + at) = make_uint4(0, 0, 0, 0);
  }
  for (std::int64_t i = lane_idx(); piece == 0 && i < params.num_scales; i += kWarpLanes) {
    params.out_scales.at(slot, i) = 0;
  }
}

__device__ std::int64_t this_warp() { return static_cast<std::int64_t>(blockIdx.x) * kWarps + warp_idx(); }
__device__ std::int64_t num_warps() { return static_cast<std::int64_t>(gridDim.x) * kWarps; }
__device__ std::int64_t this_thread() { return static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; }
__device__ std::int64_t num_threads() { return static_cast<std::int64_t>(gridDim.x) * kThreads; }

/// The pieces of all rows, then, if gaps are cleared, those of all slots.
__global__ void __launch_bounds__(kThreads) expand_kernel(const __grid_constant__ plan::ExpandParams params) {
  const std::int64_t pieces = num_pieces(params.row_bytes, kCopySteps);
  const std::int64_t num_rows = params.table.num_rows;
  const std::int64_t num_items = (num_rows + (params.zero_padding ? params.table.num_slots : 0)) * pieces;
  for (std::int64_t item = this_warp(); item < num_items; item += num_warps()) {
    const std::int64_t row = item / pieces;
    if (row < num_rows) {
      expand_piece(params, row, item % pieces);
    } else {
      clear_piece(params, row - num_rows, item % pieces);
    }
  }
}

/// No slot is named yet.
__global__ void __launch_bounds__(kThreads) forget_kernel(const __grid_constant__ plan::ExpandParams params) {
  for (std::int64_t slot = this_thread(); slot < params.table.num_slots; slot += num_threads()) {
    if (params.row_of_slot != nullptr) params.row_of_slot[slot] = -1;
    if (params.out_weights != nullptr) params.out_weights[slot] = 0.0F;
  }
}

__global__ void __launch_bounds__(kThreads) name_kernel(const __grid_constant__ plan::ExpandParams params) {
  const plan::SlotTable& table = params.table;
  for (std::int64_t entry = this_thread(); entry < table.num_rows * table.num_topk; entry += num_threads()) {
    const std::int64_t row = entry / table.num_topk;
    const std::int32_t slot = table.slot(row, static_cast<int>(entry % table.num_topk));
    if (slot >= 0) params.row_of_slot[slot] = static_cast<std::int32_t>(row);
  }
}

using Sum = device::Vector<false>;

/// Eight sums that are not rounded; NaN becomes the canonical one.
__device__ void store_exactly(const Sum& sum, float* out) {
  device::Vector<true> half;
#pragma unroll
  for (int part = 0; part < Sum::kWidth / device::Vector<true>::kWidth; ++part) {
#pragma unroll
    for (int i = 0; i < device::Vector<true>::kWidth; ++i) {
      half.values[i] = sum.values[part * device::Vector<true>::kWidth + i];
    }
    reinterpret_cast<uint4*>(out)[part] = half.round();
  }
}

__device__ void reduce_piece(const plan::ReduceParams& params, std::int64_t row, std::int64_t piece) {
  const std::int64_t row_bytes = params.hidden * static_cast<std::int64_t>(sizeof(std::uint16_t));
  const std::int64_t first = (piece * kSumSteps * kWarpLanes + lane_idx()) * kVectorBytes;
  const std::int32_t slot = slot_of_lane(params.table, row);
  Sum sums[kSumSteps];
#pragma unroll
  for (Sum& sum : sums) sum.clear();
  for (unsigned left = __ballot_sync(kAllLanes, slot >= 0); left != 0;) {
    uint4 raw[kRowsAtOnce][kSumSteps];
    const int num_left = __popc(left);
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (i >= num_left) break;
      const std::int64_t from = __shfl_sync(kAllLanes, slot, take_lowest(left));
#pragma unroll
      for (int step = 0; step < kSumSteps; ++step) {
        const std::int64_t at = first + step * kWarpLanes * kVectorBytes;
        if (at < row_bytes) raw[i][step] = *reinterpret_cast<const uint4*>(params.x + from * row_bytes + at);
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (i >= num_left) break;
#pragma unroll
      for (int step = 0; step < kSumSteps; ++step) {
        if (first + step * kWarpLanes * kVectorBytes < row_bytes) sums[step].add(raw[i][step], 1.0F);
      }
    }
  }
#pragma unroll
  for (int step = 0; step < kSumSteps; ++step) {
    const std::int64_t at = first + step * kWarpLanes * kVectorBytes;
    if (at >= row_bytes) break;
    if (params.rounds) {
      *reinterpret_cast<uint4*>(params.out_x + row * row_bytes + at) = sums[step].round();
    } else {
      store_exactly(sums[step], reinterpret_cast<float*>(params.out_x + 2 * (row * row_bytes + at)));
    }
  }
  if (piece == 0 && params.out_weights != nullptr && lane_idx() < params.table.num_topk) {
    params.out_weights[row * params.table.num_topk + lane_idx()] = params.choice_weight(row, lane_idx());
  }
}

__global__ void __launch_bounds__(kThreads) reduce_kernel(const __grid_constant__ plan::ReduceParams params) {
  const std::int64_t pieces = num_pieces(params.hidden * static_cast<std::int64_t>(sizeof(std::uint16_t)), kSumSteps);
  for (std::int64_t item = this_warp(); item < params.table.num_rows * pieces; item += num_warps()) {
    reduce_piece(params, item / pieces, item % pieces);
  }
}

/// So many items of `per_block` that a block takes at a time.
template <typename Params>
cudaError_t launch_over(void (*kernel)(Params), const Params& params, std::int64_t num_items, std::int64_t per_block,
                        int num_sms, cudaStream_t stream) {
  if (num_items == 0) return cudaSuccess;
  const std::int64_t wanted = (num_items + per_block - 1) / per_block;
  const auto num_blocks = static_cast<unsigned>(std::min(wanted, kBlocksPerSm * num_sms));
  return launch_kernel(kernel, {num_blocks, kThreads, 0}, params, stream);
}

}  // namespace

cudaError_t launch_expand(const plan::ExpandParams& params, int num_sms, cudaStream_t stream) {
  const plan::SlotTable& table = params.table;
  cudaError_t error = cudaSuccess;
  if (params.row_of_slot != nullptr || params.out_weights != nullptr) {
    error = launch_over(forget_kernel, params, table.num_slots, kThreads, num_sms, stream);
  }
  if (error == cudaSuccess && params.row_of_slot != nullptr) {
    error = launch_over(name_kernel, params, table.num_rows * table.num_topk, kThreads, num_sms, stream);
  }
  if (error != cudaSuccess) return error;
  const std::int64_t num_rows = table.num_rows + (params.zero_padding ? table.num_slots : 0);
  return launch_over(expand_kernel, params, num_rows * num_pieces(params.row_bytes, kCopySteps), kWarps, num_sms,
                     stream);
}

cudaError_t launch_reduce(const plan::ReduceParams& params, int num_sms, cudaStream_t stream) {
  const std::int64_t row_bytes = params.hidden * static_cast<std::int64_t>(sizeof(std::uint16_t));
  return launch_over(reduce_kernel, params, params.table.num_rows * num_pieces(row_bytes, kSumSteps), kWarps, num_sms,
                     stream);
}

cudaError_t load_expansion_kernels() {
  cudaFuncAttributes attributes;
  for (const void* kernel :
       {reinterpret_cast<const void*>(expand_kernel), reinterpret_cast<const void*>(forget_kernel),
        reinterpret_cast<const void*>(name_kernel), reinterpret_cast<const void*>(reduce_kernel)}) {
    if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda
