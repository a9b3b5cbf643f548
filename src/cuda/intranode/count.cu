/// First step of route: each block counts, for its tokens, the distinct ranks and the distinct experts.

#include "cuda/driver/launch.hpp"
#include "cuda/intranode/entries.cuh"

namespace ferry::cuda {
namespace {

using namespace device;

__device__ void count_block(const RouteParams& params, int block, std::int32_t* counts) {
  const int num_ranks = params.ranks.num_ranks;
  const int num_runs = num_ranks + params.num_experts;
  for (int run = static_cast<int>(threadIdx.x); run < num_runs; run += kRouteThreads) counts[run] = 0;
  __syncthreads();
  const TokenRange range = tokens_of_warp(params, block);
  const int step = kWarpLanes / lanes_per_token(params.num_topk);
  for (std::int64_t token = range.begin; token < range.end; token += step) {
    const Entry entry = load_entry(params, token, range.end);
    if (entry.first_of_rank) atomicAdd(&counts[entry.owner], 1);
    if (entry.first_of_expert) atomicAdd(&counts[num_ranks + entry.expert], 1);
    if (entry.expert >= 0 && !entry.first_of_expert) params.tables.id_marks[kRepeatMark] = 0;  // all write the same
  }
  __syncthreads();
  for (int run = static_cast<int>(threadIdx.x); run < num_runs; run += kRouteThreads) {
    if (run < num_ranks) {
      params.tables.block_ranks[block * num_ranks + run] = counts[run];
    } else {
      params.tables.block_experts[block * params.num_experts + run - num_ranks] = counts[run];
    }
  }
}

__global__ void __launch_bounds__(kRouteThreads) count_kernel(RouteParams params) {
  extern __shared__ std::int32_t counts[];  // [R + E]
  // Here, not in the exchange, whose fences would wait for a store to the host.
  if (blockIdx.x == 0 && threadIdx.x == 0 && params.host.result != nullptr) {
    store_relaxed_system(&params.host.result->started, 1);
  }
  if (is_broken(params.ranks)) return;
  for (int block = static_cast<int>(blockIdx.x); block < params.num_blocks; block += static_cast<int>(gridDim.x)) {
    count_block(params, block, counts);
    __syncthreads();
  }
}

}  // namespace

cudaError_t launch_count(const RouteParams& params, cudaStream_t stream) {
  const auto shared_bytes =
      static_cast<std::size_t>(params.ranks.num_ranks + params.num_experts) * sizeof(std::int32_t);
  const int num_blocks = params.num_blocks < params.max_blocks ? params.num_blocks : params.max_blocks;
  const LaunchShape shape{static_cast<unsigned>(num_blocks), kRouteThreads, shared_bytes};
  return launch_kernel(count_kernel, shape, params, stream);
}

cudaError_t load_count_kernel() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, count_kernel);
}

}  // namespace ferry::cuda
