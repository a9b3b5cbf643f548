/// Each entry of a prefix table is a search by one warp: for a received channel in the rows of its source, which ascend
/// by token; for a sent one among the tokens behind it, the first of which that goes to the rank has the number.

#include "cuda/call/channel_tables.hpp"

#include <algorithm>

#include "cuda/driver/launch.hpp"
#include "cuda/sync/flags.cuh"
#include "plan/slots.hpp"

namespace ferry::cuda {
namespace {

using device::kWarpLanes;
using device::lane_idx;
using device::warp_idx;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpLanes;
/// Enough to hide the latency of searches and of the copy of T = 4096 tokens' numbers.
constexpr std::int64_t kMaxBlocks = 128;
constexpr unsigned kAllLanes = 0xFFFFFFFFU;

/// This rank's number of `token` among its tokens for `rank`; -1 if it does not go there.
__device__ std::int32_t number_of(const ChannelTablesParams& params, std::int64_t token, int rank) {
  for (int k = 0; k < params.num_topk; ++k) {
    const Destination destination = params.tables.destinations[token * params.num_topk + k];
    if (destination.rank < 0 || destination.rank > rank) break;  // they ascend
    if (destination.rank == rank) return destination.token_row - params.tables.rank_base[rank];
  }
  return -1;
}

/// Tokens before `end` that go to `rank`. All lanes of a warp.
__device__ std::int32_t count_sent(const ChannelTablesParams& params, int rank, std::int32_t total, std::int64_t end) {
  for (std::int64_t first = end; first < params.num_tokens; first += kWarpLanes) {
    const std::int64_t token = first + lane_idx();
    const std::int32_t number = token < params.num_tokens ? number_of(params, token, rank) : -1;
    const unsigned found = __ballot_sync(kAllLanes, number >= 0);
    if (found != 0) return __shfl_sync(kAllLanes, number, __ffs(static_cast<int>(found)) - 1);
  }
  return total;
}

/// Rows from `first` to before `end`, ascending by token, whose token is below `bound`. All lanes of a warp: each round
/// cuts the range into 33 parts.
__device__ std::int32_t count_below(const ChannelTablesParams& params, std::int32_t first, std::int32_t end,
                                    std::int64_t bound) {
  std::int32_t low = first;
  std::int32_t high = end;
  while (low < high) {
    const std::int32_t step = (high - low + kWarpLanes) / (kWarpLanes + 1);
    const std::int32_t row = low + step * (lane_idx() + 1) - 1;
    const bool below = row < high && params.source[static_cast<std::int64_t>(row) * 2 + 1] < bound;
    const int num_below = __popc(__ballot_sync(kAllLanes, below));
    // Lanes below the bound come first: the answer is behind the last of them and at or before the next one's row.
    const std::int32_t next = low + step * (num_below + 1) - 1;
    low += step * num_below;
    if (num_below < kWarpLanes && next < high) high = next;
  }
  return low - first;
}

__device__ void write_sent(const ChannelTablesParams& params, bool valid, int task) {
  const int rank = task / params.out.num_channels;
  const int channel = task % params.out.num_channels;
  std::int32_t count = 0;
  if (valid) {
    const std::int64_t end = (channel + 1) * plan::tokens_per_channel(params.num_tokens, params.out.num_channels);
    const std::int32_t total = params.tables.rank_counts[params.rank * params.num_ranks + rank];
    count = count_sent(params, rank, total, end);
  }
  if (lane_idx() == 0) params.out.send_channel_prefix[task] = count;
}

__device__ void write_received(const ChannelTablesParams& params, bool valid, int task) {
  const int rank = task / params.out.num_channels;
  const int channel = task % params.out.num_channels;
  std::int32_t count = 0;
  if (valid) {
    const std::int64_t bound =
        channel * plan::tokens_per_channel(params.tables.tokens_of_rank[rank], params.out.num_channels);
    count = count_below(params, params.tables.source_base[rank], params.tables.source_base[rank + 1], bound);
  }
  if (lane_idx() == 0) params.out.recv_channel_prefix[task] = count;
}

__global__ void __launch_bounds__(kThreads) channel_tables_kernel(ChannelTablesParams params) {
  // Loaded at once: each may go to memory. Routes over several nodes have no source offsets, and are not early.
  const std::uint32_t broken = *static_cast<const volatile std::uint32_t*>(&params.local->broken);
  const std::int64_t source_offset = params.early ? params.tables.source_offsets[params.rank] : 0;
  const bool valid = params.tables.summary->valid != 0;
  // What a broken route has written may be nothing, and the numbers found in its memory anything.
  if (broken != 0) return;
  if (source_offset == kAnnouncedLater) return;
  const int num_ranks = params.num_ranks;
  const int num_prefixes = num_ranks * params.out.num_channels;
  const int num_warps = static_cast<int>(gridDim.x) * kWarps;
  for (int task = static_cast<int>(blockIdx.x) * kWarps + warp_idx(); task < 2 * num_prefixes; task += num_warps) {
    if (task < num_prefixes) {
      if (params.out.send_channel_prefix != nullptr) write_sent(params, valid, task);
    } else if (params.out.recv_channel_prefix != nullptr) {
      write_received(params, valid, task - num_prefixes);
    }
  }
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t num_threads = static_cast<std::int64_t>(gridDim.x) * kThreads;
  if (params.out.rank_prefix != nullptr && blockIdx.x == gridDim.x - 1) {
    for (int rank = static_cast<int>(threadIdx.x); rank < num_ranks; rank += kThreads) {
      std::int32_t sum = 0;
      for (int source = 0; source < num_ranks; ++source) {
        if (valid) sum += params.tables.rank_counts[source * num_ranks + rank];
        params.out.rank_prefix[source * num_ranks + rank] = sum;
      }
    }
  }
  if (params.out.source_token != nullptr) {
    const std::int64_t num_used = valid ? params.tables.summary->num_used_rows : 0;
    for (std::int64_t row = thread; row < params.out.num_rows; row += num_threads) {
      params.out.source_token[row] = row < num_used ? params.source[row * 2 + 1] : -1;
    }
  }
  if (params.out.send_index != nullptr) {
    for (std::int64_t at = thread; at < params.num_tokens * num_ranks; at += num_threads) {
      params.out.send_index[at] = valid ? number_of(params, at / num_ranks, static_cast<int>(at % num_ranks)) : -1;
    }
  }
}

}  // namespace

cudaError_t launch_channel_tables(const ChannelTablesParams& params, cudaStream_t stream) {
  const std::int64_t num_items = std::max({params.num_tokens * params.num_ranks, params.out.num_rows,
                                           std::int64_t{2} * kWarpLanes * params.num_ranks * params.out.num_channels});
  const std::int64_t num_blocks = std::clamp<std::int64_t>((num_items + kThreads - 1) / kThreads, 1, kMaxBlocks);
  return launch_kernel(channel_tables_kernel, {static_cast<unsigned>(num_blocks), kThreads, 0}, params, stream);
}

cudaError_t load_channel_tables_kernel() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(channel_tables_kernel));
}

}  // namespace ferry::cuda
