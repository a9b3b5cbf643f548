/// Counts of one rank's tokens by rank, node and expert. A lane takes an entry, so that neighbours load neighbours; the
/// lanes of a token find its distinct ranks together, as bits of a register.

#include "cuda/intranode/token_layout.hpp"

#include <algorithm>
#include <bit>

#include "cuda/driver/launch.hpp"
#include "cuda/sync/kernel_order.cuh"
#include "cuda/sync/memory_order.cuh"
#include "cuda/sync/shared_memory.cuh"
#include "plan/slots.hpp"

namespace ferry::cuda {
namespace {

using device::kWarpLanes;
using device::lane_idx;

constexpr unsigned kThreads = 1024;
constexpr int kWarps = kThreads / kWarpLanes;
/// Entries that a lane loads before it counts the first: one block has too few warps to hide each load's way to memory.
constexpr int kEntriesAtOnce = 8;

struct LayoutKernelParams {
  plan::TokenLayoutParams layout;
  int lanes_per_token = 1;  ///< a power of two, at least K
  bool alone = true;        ///< one block counts everything, and stores instead of adding
};

/// Shared memory of a block.
struct Counts {
  std::int32_t* experts;  // [E]
  std::int32_t* ranks;    // [R]
  std::int32_t* nodes;    // [nodes]
  std::int16_t* owner;    // [E]
};

/// A lane's entry of a token.
struct Entry {
  std::int64_t token;
  int expert;  ///< -1: none
};

/// Which of its token's keys a lane writes, and counts where they are few: its place among the token's lanes.
struct TokenLanes {
  int num_lanes;
  int place;

  __device__ explicit TokenLanes(int lanes) : num_lanes(lanes), place(lane_idx() % lanes) {}

  /// Bits that any lane of the token has. All lanes of the warp call it.
  __device__ unsigned any(unsigned bits) const {
    for (int distance = num_lanes / 2; distance > 0; distance /= 2) {
      bits |= __shfl_xor_sync(device::kAllLanes, bits, distance);
    }
    return bits;
  }
};

__device__ Entry load_entry(const plan::TokenLayoutParams& layout, const TokenLanes& lanes, std::int64_t token) {
  Entry entry{token, -1};
  if (token >= layout.num_tokens || lanes.place >= layout.num_topk) return entry;
  const std::int64_t at = token * layout.num_topk + lanes.place;
  const std::int64_t id = layout.wide_ids ? static_cast<const std::int64_t*>(layout.ids)[at]
                                          : static_cast<const std::int32_t*>(layout.ids)[at];
  if (id >= 0 && id < layout.num_experts) entry.expert = static_cast<int>(id);
  return entry;
}

/// Counts tokens of no more ranks than a token has lanes: each lane keeps the sum of one rank and of one node.
class FewRanks {
 public:
  __device__ FewRanks(const plan::TokenLayoutParams& layout, const TokenLanes& lanes)
      : layout_(layout),
        lanes_(lanes),
        num_nodes_((layout.num_ranks + layout.ranks_per_node - 1) / layout.ranks_per_node),
        node_mask_(layout.ranks_per_node < kWarpLanes ? (1U << layout.ranks_per_node) - 1 : device::kAllLanes) {}

  __device__ void add(const Entry& entry, int owner, const Counts& /*counts*/) {
    const unsigned ranks = lanes_.any(owner < 0 ? 0 : 1U << owner);
    if (entry.token >= layout_.num_tokens) return;
    if (lanes_.place < layout_.num_ranks) {
      const unsigned in_rank = ranks >> lanes_.place & 1U;
      num_of_rank_ += static_cast<std::int32_t>(in_rank);
      if (layout_.token_in_rank != nullptr) {
        layout_.token_in_rank[entry.token * layout_.num_ranks + lanes_.place] = static_cast<std::uint8_t>(in_rank);
      }
    }
    if (lanes_.place < num_nodes_ && (ranks >> (lanes_.place * layout_.ranks_per_node) & node_mask_) != 0) {
      ++num_of_node_;
    }
  }

  /// All lanes of a warp call it, once.
  __device__ void finish(const Counts& counts) {
    for (int distance = lanes_.num_lanes; distance < kWarpLanes; distance *= 2) {
      num_of_rank_ += __shfl_xor_sync(device::kAllLanes, num_of_rank_, distance);
      num_of_node_ += __shfl_xor_sync(device::kAllLanes, num_of_node_, distance);
    }
    if (num_of_rank_ != 0 && lane_idx() < layout_.num_ranks) atomicAdd(&counts.ranks[lane_idx()], num_of_rank_);
    if (num_of_node_ != 0 && lane_idx() < num_nodes_) atomicAdd(&counts.nodes[lane_idx()], num_of_node_);
  }

 private:
  const plan::TokenLayoutParams& layout_;
  TokenLanes lanes_;
  int num_nodes_;
  unsigned node_mask_;
  std::int32_t num_of_rank_ = 0;
  std::int32_t num_of_node_ = 0;
};

/// Counts tokens of any number of ranks, 32 at a time, by votes of the lanes that begin a token.
class ManyRanks {
 public:
  __device__ ManyRanks(const plan::TokenLayoutParams& layout, const TokenLanes& lanes)
      : layout_(layout),
        lanes_(lanes),
        num_nodes_((layout.num_ranks + layout.ranks_per_node - 1) / layout.ranks_per_node) {}

  __device__ void add(const Entry& entry, int owner, const Counts& counts) {
    count(owner, layout_.num_ranks, counts.ranks, [&](int first, int num, unsigned ranks) {
      if (layout_.token_in_rank == nullptr || entry.token >= layout_.num_tokens) return;
      std::uint8_t* row = layout_.token_in_rank + entry.token * layout_.num_ranks + first;
      for (int rank = lanes_.place; rank < num; rank += lanes_.num_lanes) {
        row[rank] = static_cast<std::uint8_t>(ranks >> rank & 1U);
      }
    });
    if (layout_.tokens_per_node == nullptr) return;
    count(owner < 0 ? -1 : owner / layout_.ranks_per_node, num_nodes_, counts.nodes, [](int, int, unsigned) {});
  }

  __device__ void finish(const Counts& /*counts*/) {}

 private:
  /// Adds the token's distinct keys, of `num_keys`, to `sums`. `each_word` gets every 32 keys as bits.
  template <typename EachWord>
  __device__ void count(int key, int num_keys, std::int32_t* sums, EachWord each_word) {
    for (int first = 0; first < num_keys; first += kWarpLanes) {
      const int num = min(num_keys - first, kWarpLanes);
      const unsigned keys = lanes_.any(key >= first && key < first + num ? 1U << (key - first) : 0);
      std::int32_t of_lane = 0;
      for (int bit = 0; bit < num; ++bit) {
        const unsigned votes = __ballot_sync(device::kAllLanes, lanes_.place == 0 && (keys >> bit & 1U) != 0);
        if (lane_idx() == bit) of_lane = __popc(votes);
      }
      if (of_lane != 0) atomicAdd(&sums[first + lane_idx()], of_lane);
      each_word(first, num, keys);
    }
  }

  const plan::TokenLayoutParams& layout_;
  TokenLanes lanes_;
  int num_nodes_;
};

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

template <typename Ranks>
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

  const TokenLanes lanes(params.lanes_per_token);
  Ranks ranks(layout, lanes);
  const int tokens_per_warp = kWarpLanes / lanes.num_lanes;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kWarps * tokens_per_warp;
  const std::int64_t first = (static_cast<std::int64_t>(blockIdx.x) * kWarps + device::warp_idx()) * tokens_per_warp;
  for (std::int64_t base = first; base < layout.num_tokens; base += kEntriesAtOnce * step) {
    Entry entries[kEntriesAtOnce];
#pragma unroll
    for (int i = 0; i < kEntriesAtOnce; ++i) {
      entries[i] = load_entry(layout, lanes, base + i * step + lane_idx() / lanes.num_lanes);
    }
#pragma unroll
    for (int i = 0; i < kEntriesAtOnce; ++i) {
      if (base + i * step >= layout.num_tokens) break;
      const int expert = entries[i].expert;
      if (expert >= 0) atomicAdd(&counts.experts[expert], 1);
      ranks.add(entries[i], expert < 0 ? -1 : counts.owner[expert], counts);
    }
  }
  ranks.finish(counts);
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
  const int lanes_per_token = std::bit_ceil(static_cast<unsigned>(std::max(layout.num_topk, 1)));
  const LayoutKernelParams params{layout, lanes_per_token, blocks.num_blocks == 1};
  if (!params.alone) {
    const cudaError_t error = launch_kernel(clear_kernel, {.num_threads = kThreads}, layout, stream);
    if (error != cudaSuccess) return error;
  }
  const auto num_experts = static_cast<std::size_t>(layout.num_experts);
  const std::size_t num_sums = num_experts + static_cast<std::size_t>(layout.num_ranks + layout.num_nodes());
  const LaunchShape shape{static_cast<unsigned>(blocks.num_blocks), kThreads,
                          num_sums * sizeof(std::int32_t) + num_experts * sizeof(std::int16_t),
                          !params.alone && blocks.overlap};
  const bool few = layout.num_ranks <= lanes_per_token;
  return launch_kernel(few ? layout_kernel<FewRanks> : layout_kernel<ManyRanks>, shape, params, stream);
}

bool layout_can_overlap() {
  static const bool can = [] {
    constexpr int kFirstToOverlap = 90;  // PTX ISA, griddepcontrol: sm_90
    void (*const kernel)(LayoutKernelParams) = layout_kernel<FewRanks>;
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
    return error == cudaSuccess && attributes.ptxVersion >= kFirstToOverlap &&
           attributes.binaryVersion >= kFirstToOverlap;
  }();
  return can;
}

}  // namespace ferry::cuda
