/// What a dispatch brought, a thread for each row, and a block for each expert of rows that are expanded. Nothing is
/// read that another block writes, so blocks need not meet.

#include "cuda/local/arrival_tables.hpp"

#include <algorithm>

#include "cuda/driver/launch.hpp"
#include "cuda/local/arrival_slots.cuh"
#include "cuda/sync/flags.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using device::kAllLanes;
using device::kWarpLanes;
using device::lane_idx;
using device::warp_idx;

constexpr int kThreads = 256;
/// Enough to hide the latency of the loads for the rows of 8 x 4096 tokens.
constexpr std::int64_t kMaxBlocks = 128;
/// Of more experts some share a block.
constexpr std::int64_t kMaxExpertBlocks = 512;

using SlotWriter = device::SlotWriter<kThreads / kWarpLanes>;

struct ArrivalKernelParams {
  plan::ArrivalParams arrivals;
  unsigned num_expert_blocks = 0;  ///< the first ones; the others take rows
};

/// Prefix sums by one warp. All of its lanes.
__device__ void write_expert_ends(const plan::ArrivalParams& params) {
  std::int32_t before = 0;
  for (std::int64_t first = 0; first < params.num_experts; first += kWarpLanes) {
    const std::int64_t expert = first + lane_idx();
    std::int32_t end = expert < params.num_experts ? params.aligned_rows(expert) : 0;
    for (int distance = 1; distance < kWarpLanes; distance *= 2) {
      const std::int32_t lower = __shfl_up_sync(kAllLanes, end, static_cast<unsigned>(distance));
      if (lane_idx() >= distance) end += lower;
    }
    if (expert < params.num_experts) params.expert_ends[expert] = before + end;
    before += __shfl_sync(kAllLanes, end, kWarpLanes - 1);
  }
}

__device__ void write_rows(const plan::ArrivalParams& params, unsigned block, unsigned num_blocks) {
  // The last block has the fewest rows.
  if (params.expert_ends != nullptr && !params.expand && block == num_blocks - 1 && warp_idx() == 0) {
    write_expert_ends(params);
  }
  const std::int64_t thread = static_cast<std::int64_t>(block) * kThreads + threadIdx.x;
  const std::int64_t num_threads = static_cast<std::int64_t>(num_blocks) * kThreads;
  for (std::int64_t row = thread; row < params.num_rows; row += num_threads) {
    if (params.origin != nullptr) plan::write_origin(params, row);
    if (params.last_equal != nullptr) plan::write_last_equal(params, row);
    if (params.rows_through_rank != nullptr) plan::write_rank_end(params, row);
  }
  if (params.num_rows == 0 && params.rows_through_rank != nullptr) {
    for (std::int64_t rank = thread; rank < params.num_ranks; rank += num_threads) params.rows_through_rank[rank] = 0;
  }
  if (params.sent_ids_copy == nullptr) return;
  for (std::int64_t at = thread; at < params.num_sent_ids; at += num_threads) {
    params.sent_ids_copy[at] = params.sent_ids[at];
  }
}

__global__ void __launch_bounds__(kThreads) arrivals_kernel(const __grid_constant__ ArrivalKernelParams params) {
  const plan::ArrivalParams& arrivals = params.arrivals;
  if (blockIdx.x >= params.num_expert_blocks) {
    write_rows(arrivals, blockIdx.x - params.num_expert_blocks, gridDim.x - params.num_expert_blocks);
    return;
  }
  SlotWriter slots(arrivals, *reinterpret_cast<SlotWriter::Shared*>(device::dynamic_shared()));
  for (std::int64_t expert = blockIdx.x; expert < arrivals.num_experts; expert += params.num_expert_blocks) {
    slots.write(expert);
  }
}

}  // namespace

cudaError_t launch_arrivals(const plan::ArrivalParams& params, cudaStream_t stream) {
  const std::int64_t num_items = std::max(params.num_rows, params.num_sent_ids);
  const std::int64_t num_blocks = std::clamp<std::int64_t>((num_items + kThreads - 1) / kThreads, 1, kMaxBlocks);
  const std::int64_t num_expert_blocks = params.expand ? std::min(params.num_experts, kMaxExpertBlocks) : 0;
  const LaunchShape shape{static_cast<unsigned>(num_blocks + num_expert_blocks), kThreads,
                          params.expand ? sizeof(SlotWriter::Shared) : 0};
  return launch_kernel(arrivals_kernel, shape, ArrivalKernelParams{params, static_cast<unsigned>(num_expert_blocks)},
                       stream);
}

cudaError_t load_arrivals_kernel() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(arrivals_kernel));
}

}  // namespace ferry::cuda
