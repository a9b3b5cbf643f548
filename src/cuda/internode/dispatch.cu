/// Kernel of a dispatch over several nodes after the exchange. One warp per row.

#include "cuda/driver/launch.hpp"
#include "cuda/internode/dispatch_params.hpp"
#include "cuda/internode/pull.cuh"
#include "cuda/sync/entry.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;

constexpr int kPullThreads = 512;

/// Staging of a rank of the node and its number of blocks. In shared memory, one per rank.
struct Holder {
  PullHolder staging;
  int num_blocks;
};

/// `held`: see pull_row(), for each warp.
__device__ void pull_rows(const PullParams& params, const Holder* holders, std::uint32_t* held) {
  constexpr int kWarps = kPullThreads / kWarpLanes;
  const int num_warps = params.num_blocks * kWarps;
  for (std::int64_t row = static_cast<int>(blockIdx.x) * kWarps + warp_idx(); row < params.num_rows; row += num_warps) {
    const RowItem from = params.row_items[row];
    if (from.forwarder >= 0)
      pull_row(params, holders[from.forwarder].staging, row, from.item, held + warp_idx() * kHeldWords);
  }
}

__global__ void __launch_bounds__(kPullThreads, 1) pull_kernel(const __grid_constant__ PullParams params) {
  const RankParams& ranks = params.ranks;
  const CallStart start = start_call(ranks, params.gate);
  if (start.broken || !start.routed) return;
  auto* holders = reinterpret_cast<Holder*>(dynamic_shared());
  auto* num_blocks = reinterpret_cast<int*>(holders + ranks.num_ranks);
  auto* held = reinterpret_cast<std::uint32_t*>(num_blocks + ranks.num_ranks);
  const bool first = blockIdx.x == 0;
  if (first && warp_idx() == kPullThreads / kWarpLanes - 1) post_entry(ranks, params.entry, start.epoch);
  const Outcome outcome = await_entries(ranks, params.entry, start.epoch, [&](int rank, const ReceivedEntry& entry) {
    const std::byte* base = ranks.peer_bases[rank];
    const Holder holder{{base + entry.rows_offset(), base + entry.tables_offset()}, entry.num_blocks()};
    if (lane_idx() == 0) {
      holders[rank] = holder;
      num_blocks[rank] = holder.num_blocks;
    }
  });
  if (outcome == Outcome::kStop) return;
  if (first && threadIdx.x == 0) {
    // Read by the kernel that fills rows without a token.
    store_release_system(&ranks.control.local->outcome, start.epoch << 2 | static_cast<std::uint64_t>(outcome));
  }
  if (outcome == Outcome::kGo) pull_rows(params, holders, held);
  post_block_done(ranks, start.epoch);
  if (first) finish_blocks(ranks, start.epoch, num_blocks);
}

}  // namespace

cudaError_t launch_pull(const PullParams& params, cudaStream_t stream) {
  constexpr std::size_t kHeldBytes = kPullThreads / kWarpLanes * kHeldWords * sizeof(std::uint32_t);
  const std::size_t shared_bytes =
      static_cast<std::size_t>(params.ranks.num_ranks) * (sizeof(Holder) + sizeof(int)) + kHeldBytes;
  return launch_kernel(pull_kernel, {static_cast<unsigned>(params.num_blocks), kPullThreads, shared_bytes}, params,
                       stream);
}

cudaError_t load_node_dispatch_kernels() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(pull_kernel));
}

}  // namespace ferry::cuda
