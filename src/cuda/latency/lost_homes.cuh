#ifndef FERRY_CUDA_LATENCY_LOST_HOMES_CUH
#define FERRY_CUDA_LATENCY_LOST_HOMES_CUH

/// Experts of masked ranks in a dispatch of a group that masks ranks (mask.hpp).

#include <cstddef>
#include <cstdint>

#include "cuda/latency/dispatch_send.cuh"
#include "cuda/latency/mask.cuh"
#include "plan/carver.hpp"

namespace ferry::cuda::device {

/// Homes from which this rank's tokens pick, without those on ranks that it masks, in a block's shared memory. Masks do
/// not change while a half runs, so all blocks pick the same.
struct HomesLeft {
  bool* is_masked;          ///< [R]
  plan::HomeRange* ranges;  ///< [E] each at its index in the call's table
  std::int32_t* homes;      ///< [P]
  std::size_t size_bytes;

  FERRY_HOST_DEVICE static HomesLeft at(std::byte* base, int num_ranks, int num_logical, int num_physical) {
    plan::Carver carver(base);
    HomesLeft left{};
    left.is_masked = carver.take<bool>(static_cast<std::size_t>(num_ranks));
    left.ranges = carver.take<plan::HomeRange>(static_cast<std::size_t>(num_logical));
    left.homes = carver.take<std::int32_t>(static_cast<std::size_t>(num_physical));
    left.size_bytes = carver.used_bytes();
    return left;
  }
  /// `num_logical` 0: experts have one home each, and no memory is needed.
  static std::size_t size_bytes_for(int num_ranks, int num_logical, int num_physical) {
    return num_logical == 0 ? 0 : at(nullptr, num_ranks, num_logical, num_physical).size_bytes;
  }
};

/// Replaces the homes by those that are left (plan::without_lost_homes). All threads; `own` is in shared memory.
__device__ __noinline__ inline void pick_homes_left(Masked<DispatchSendParams>& own, std::byte* memory) {
  const LatencyParams& call = own.call;
  const PlacementTables& placement = own.placement;
  const HomeTables table = placement.homes;
  const HomesLeft left = HomesLeft::at(memory, call.ranks.num_ranks, table.num_logical, call.num_experts);
  bool any = false;
  for (int rank = static_cast<int>(threadIdx.x); rank < call.ranks.num_ranks; rank += kDispatchThreads) {
    left.is_masked[rank] = is_masked(own.mask, rank);
    any = any || left.is_masked[rank];
  }
  if (__syncthreads_or(static_cast<int>(any)) == 0) return;
#pragma unroll 1
  for (int expert = static_cast<int>(threadIdx.x); expert < table.num_logical; expert += kDispatchThreads) {
    plan::HomeRange range = table.ranges[expert];
    std::uint32_t num_left = 0;
    for (std::uint32_t i = 0; i < range.count; ++i) {
      const std::int32_t home = table.homes[range.first + i];
      if (!left.is_masked[placement.owner[home]]) left.homes[range.first + num_left++] = home;
    }
    for (std::uint32_t i = 0; num_left == 0 && i < range.count; ++i) {
      left.homes[range.first + i] = table.homes[range.first + i];
    }
    if (num_left != 0) range.count = num_left;
    left.ranges[expert] = range;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    own.placement.homes.ranges = left.ranges;
    own.placement.homes.homes = left.homes;
  }
  __syncthreads();
}

/// Clears the slots of entries whose ranks have been masked since the send half. All threads of a block.
__device__ inline void clear_lost_slots(const LatencyParams& call) {
  const std::int64_t num_entries = call.num_tokens * call.num_topk;
#pragma unroll 1
  for (std::int64_t i = threadIdx.x; i < num_entries; i += kDispatchThreads) {
    if (call.tables.homes[i] < -1) call.tables.slots[i] = -1;
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_LOST_HOMES_CUH
