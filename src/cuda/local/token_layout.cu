/// Counts of one rank's tokens by rank, node and expert. A thread takes a token, so that a token's distinct ranks are
/// bits of a register; a warp adds them up by votes.

#include "cuda/local/token_layout.hpp"

#include "cuda/driver/launch.hpp"
#include "cuda/sync/flags.cuh"
#include "cuda/sync/kernel_order.cuh"
#include "cuda/sync/shared_memory.cuh"
#include "plan/slots.hpp"

namespace ferry::cuda {
namespace {

using device::kWarpLanes;
using device::lane_idx;

constexpr unsigned kThreads = 1024;

struct LayoutKernelParams {
  plan::TokenLayoutParams layout;
  bool alone = true;  ///< one block counts everything, and stores instead of adding
};

/// Shared memory of a block.
struct Counts {
  std::int32_t* experts;  // [E]
  std::int32_t* ranks;    // [R]
  std::int32_t* nodes;    // [nodes]
  std::int16_t* owner;    // [E]
};

__device__ std::int64_t id_at(const plan::TokenLayoutParams& layout, std::int64_t at) {
  return layout.wide_ids ? static_cast<const std::int64_t*>(layout.ids)[at]
                         : static_cast<const std::int32_t*>(layout.ids)[at];
}

/// The owner of an entry's expert, -1 if it has none.
__device__ int owner_of(const plan::TokenLayoutParams& layout, const Counts& counts, std::int64_t id) {
  return id >= 0 && id < layout.num_experts ? counts.owner[id] : -1;
}

/// Adds the token's distinct keys, `num_keys` of them, to `sums`. All lanes of a warp call it; a lane without a token
/// has token -1. `each_word` gets every 32 keys as bits.
template <typename EachWord>
__device__ void count_distinct(const plan::TokenLayoutParams& layout, const Counts& counts, std::int64_t token,
                               int ranks_per_key, int num_keys, std::int32_t* sums, EachWord each_word) {
  for (int first = 0; first < num_keys; first += kWarpLanes) {
    unsigned keys = 0;
    for (int k = 0; token >= 0 && k < layout.num_topk; ++k) {
      const int owner = owner_of(layout, counts, id_at(layout, token * layout.num_topk + k));
      const int key = owner < 0 ? -1 : owner / ranks_per_key - first;
      if (key >= 0 && key < kWarpLanes) keys |= 1U << key;
    }
    const int last = min(num_keys - first, kWarpLanes);
    std::int32_t of_lane = 0;
    for (int key = 0; key < last; ++key) {
      const unsigned votes = __ballot_sync(device::kAllLanes, (keys >> key & 1U) != 0);
      if (lane_idx() == key) of_lane = __popc(votes);
    }
    if (of_lane != 0) atomicAdd(&sums[first + lane_idx()], of_lane);
    each_word(first, last, keys);
  }
}

__device__ void give(std::int32_t* out, const std::int32_t* sums, int num_sums, bool alone) {
  if (out == nullptr) return;
  for (int i = static_cast<int>(threadIdx.x); i < num_sums; i += static_cast<int>(blockDim.x)) {
    if (alone) {
      out[i] = sums[i];
    } else if (sums[i] != 0) {
      atomicAdd(&out[i], sums[i]);
    }
  }
}

__global__ void __launch_bounds__(kThreads) layout_kernel(LayoutKernelParams params) {
  auto* const shared = reinterpret_cast<std::int32_t*>(device::dynamic_shared());
  const plan::TokenLayoutParams& layout = params.layout;
  const int num_experts = static_cast<int>(layout.num_experts);
  const int num_nodes = (layout.num_ranks + layout.ranks_per_node - 1) / layout.ranks_per_node;
  Counts counts;
  counts.experts = shared;
  counts.ranks = counts.experts + num_experts;
  counts.nodes = counts.ranks + layout.num_ranks;
  counts.owner = reinterpret_cast<std::int16_t*>(counts.nodes + num_nodes);
  for (int i = static_cast<int>(threadIdx.x); i < num_experts + layout.num_ranks + num_nodes; i += kThreads) {
    shared[i] = 0;
  }
  for (int expert = static_cast<int>(threadIdx.x); expert < num_experts; expert += kThreads) {
    const std::int64_t owner = layout.expert_to_rank != nullptr
                                   ? layout.expert_to_rank[expert]
                                   : plan::default_owner(expert, num_experts, layout.num_ranks);
    counts.owner[expert] = static_cast<std::int16_t>(owner >= 0 && owner < layout.num_ranks ? owner : -1);
  }
  __syncthreads();

  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  // Blocks share the tokens warp by warp, so that all have some.
  const std::int64_t first =
      (static_cast<std::int64_t>(device::warp_idx()) * gridDim.x + static_cast<std::int64_t>(blockIdx.x)) * kWarpLanes;
  for (std::int64_t base = first; base < layout.num_tokens; base += step) {
    const std::int64_t mine = base + lane_idx();
    const std::int64_t token = mine < layout.num_tokens ? mine : -1;
    for (int k = 0; token >= 0 && k < layout.num_topk; ++k) {
      const std::int64_t id = id_at(layout, token * layout.num_topk + k);
      if (id >= 0 && id < num_experts) atomicAdd(&counts.experts[id], 1);
    }
    count_distinct(layout, counts, token, 1, layout.num_ranks, counts.ranks, [&](int from, int num, unsigned ranks) {
      if (layout.token_in_rank == nullptr || token < 0) return;
      std::uint8_t* row = layout.token_in_rank + token * layout.num_ranks + from;
      for (int rank = 0; rank < num; ++rank) row[rank] = static_cast<std::uint8_t>(ranks >> rank & 1U);
    });
    if (layout.tokens_per_node != nullptr) {
      count_distinct(layout, counts, token, layout.ranks_per_node, num_nodes, counts.nodes, [](int, int, unsigned) {});
    }
  }
  __syncthreads();
  device::await_kernel_before();
  give(layout.entries_per_expert, counts.experts, num_experts, params.alone);
  give(layout.tokens_per_rank, counts.ranks, layout.num_ranks, params.alone);
  give(layout.tokens_per_node, counts.nodes, num_nodes, params.alone);
}

/// Zeroes what the blocks of a layout add to.
__global__ void __launch_bounds__(kThreads) clear_kernel(plan::TokenLayoutParams layout) {
  device::let_next_kernel_begin();
  const auto clear = [](std::int32_t* counts, int num_counts) {
    if (counts == nullptr) return;
    for (int i = static_cast<int>(threadIdx.x); i < num_counts; i += kThreads) counts[i] = 0;
  };
  clear(layout.tokens_per_rank, layout.num_ranks);
  clear(layout.tokens_per_node, (layout.num_ranks + layout.ranks_per_node - 1) / layout.ranks_per_node);
  clear(layout.entries_per_expert, static_cast<int>(layout.num_experts));
}

}  // namespace

cudaError_t launch_layout(const plan::TokenLayoutParams& layout, const LayoutBlocks& blocks, cudaStream_t stream) {
  const LayoutKernelParams params{layout, blocks.num_blocks == 1};
  if (!params.alone) {
    const cudaError_t error = launch_kernel(clear_kernel, {.num_threads = kThreads}, layout, stream);
    if (error != cudaSuccess) return error;
  }
  const auto num_experts = static_cast<std::size_t>(layout.num_experts);
  const std::size_t num_sums = num_experts + static_cast<std::size_t>(layout.num_ranks + layout.num_nodes());
  const LaunchShape shape{static_cast<unsigned>(blocks.num_blocks), kThreads,
                          num_sums * sizeof(std::int32_t) + num_experts * sizeof(std::int16_t),
                          !params.alone && blocks.overlap};
  return launch_kernel(layout_kernel, shape, params, stream);
}

cudaError_t load_layout_kernels() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(clear_kernel));
  if (error != cudaSuccess) return error;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(layout_kernel));
}

bool layout_can_overlap() {
  static const bool can = [] {
    constexpr int kFirstToOverlap = 90;  // PTX ISA, griddepcontrol: sm_90
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(layout_kernel));
    return error == cudaSuccess && attributes.ptxVersion >= kFirstToOverlap &&
           attributes.binaryVersion >= kFirstToOverlap;
  }();
  return can;
}

}  // namespace ferry::cuda
