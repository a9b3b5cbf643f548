/// Builds the table of homes (plan/replicas.hpp) from a placement in device memory, and checks the placement.

#include <algorithm>

#include "cuda/driver/launch.hpp"
#include "cuda/placement/homes_params.hpp"
#include "cuda/sync/rank_sync.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;

constexpr int kHomesThreads = 1024;
constexpr unsigned kNobody = 0xFFFFFFFFU;

/// Distance for an expert without a home; larger than the distance of any home from the rank whose tokens choose.
constexpr unsigned kNoHome = 3;

/// Shared memory of the block.
struct HomesShared {
  unsigned long long hash;
  unsigned first_wrong;    ///< physical expert whose entry names no expert; kNobody: none
  unsigned first_missing;  ///< logical expert without a home; kNobody: none
  std::int32_t* logical;   ///< [P] -1: none
  unsigned* distance;      ///< [E] distance of the nearest home
  unsigned* count;         ///< [E] number of homes at that distance
};

__host__ __device__ std::size_t homes_shared_bytes(int num_physical, int num_logical) {
  return sizeof(HomesShared) +
         sizeof(std::int32_t) * (static_cast<std::size_t>(num_physical) + 2 * static_cast<std::size_t>(num_logical));
}

__device__ unsigned distance_of(const HomesParams& params, int physical) {
  const int owner = params.owner[physical];
  if (!params.nearest || owner == params.rank) return 0;
  return owner / params.ranks_per_node == params.rank / params.ranks_per_node ? 1 : 2;
}

/// Hash of an entry and its place, to be summed over all entries (the last step of splitmix64).
__device__ unsigned long long mix(int physical, std::int32_t logical) {
  unsigned long long value = static_cast<unsigned long long>(physical + 1) << 32 | static_cast<unsigned>(logical);
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ULL;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
  return value ^ (value >> 31);
}

/// Finds the nearest homes. All threads call it.
__device__ void find_nearest(const HomesParams& params, HomesShared& shared) {
  for (int physical = static_cast<int>(threadIdx.x); physical < params.num_physical; physical += kHomesThreads) {
    const std::int32_t logical = params.physical_to_logical[physical];
    const bool wrong = logical < -1 || logical >= params.num_logical;
    if (wrong) atomicMin(&shared.first_wrong, static_cast<unsigned>(physical));
    shared.logical[physical] = wrong ? -1 : logical;
    params.logical_of[physical] = wrong ? -1 : logical;
    atomicAdd(&shared.hash, mix(physical, logical));
    if (!wrong && logical >= 0) atomicMin(&shared.distance[logical], distance_of(params, physical));
  }
  __syncthreads();
  for (int physical = static_cast<int>(threadIdx.x); physical < params.num_physical; physical += kHomesThreads) {
    const std::int32_t logical = shared.logical[physical];
    if (logical < 0) continue;
    if (distance_of(params, physical) == shared.distance[logical]) {
      atomicAdd(&shared.count[logical], 1U);
    } else {
      shared.logical[physical] = -1;  // no token of this rank picks this home
    }
  }
  __syncthreads();
}

/// Computes where each expert's homes begin in the list. One warp calls it.
__device__ void place_ranges(const HomesParams& params, HomesShared& shared) {
  unsigned before = 0;
  for (int first = 0; first < params.num_logical; first += kWarpLanes) {
    const int logical = first + lane_idx();
    const unsigned count = logical < params.num_logical ? shared.count[logical] : 0;
    unsigned end = count;
    for (int distance = 1; distance < kWarpLanes; distance *= 2) {
      const unsigned below = __shfl_up_sync(kAllLanes, end, static_cast<unsigned>(distance));
      if (lane_idx() >= distance) end += below;
    }
    if (logical < params.num_logical) {
      if (count == 0 && !params.allow_homeless) atomicMin(&shared.first_missing, static_cast<unsigned>(logical));
      params.ranges[logical] = plan::HomeRange{before + end - count, count};
    }
    before += __shfl_sync(kAllLanes, end, kWarpLanes - 1);
  }
}

/// Runs as one block, which sees the whole table.
__global__ void __launch_bounds__(kHomesThreads) homes_kernel(const __grid_constant__ HomesParams params) {
  auto& shared = *reinterpret_cast<HomesShared*>(dynamic_shared());
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    shared.hash = 0;
    shared.first_wrong = kNobody;
    shared.first_missing = kNobody;
    shared.logical = reinterpret_cast<std::int32_t*>(&shared + 1);
    shared.distance = reinterpret_cast<unsigned*>(shared.logical + params.num_physical);
    shared.count = shared.distance + params.num_logical;
  }
  __syncthreads();
  for (int logical = thread; logical < params.num_logical; logical += kHomesThreads) {
    shared.distance[logical] = kNoHome;
    shared.count[logical] = 0;
  }
  __syncthreads();
  find_nearest(params, shared);
  if (thread < kWarpLanes) place_ranges(params, shared);
  __syncthreads();
  for (int physical = thread; physical < params.num_physical; physical += kHomesThreads) {
    const std::int32_t logical = shared.logical[physical];
    if (logical < 0) continue;
    unsigned before = 0;
    for (int other = 0; other < physical; ++other) before += shared.logical[other] == logical ? 1 : 0;
    params.homes[params.ranges[logical].first + before] = physical;
  }
  if (thread != 0) return;
  HomesCheck& check = *params.check;
  check.hash = shared.hash;
  check.bad_entry = -1;
  check.bad_value = 0;
  if (shared.first_wrong != kNobody) {
    check.bad_entry = kFirstBadHome + shared.first_wrong;
    check.bad_value = params.physical_to_logical[shared.first_wrong];
  } else if (shared.first_missing != kNobody) {
    check.bad_entry = kFirstMissingHome;
    check.bad_value = shared.first_missing;
  }
}

}  // namespace

cudaError_t launch_homes(const HomesParams& params, cudaStream_t stream) {
  return launch_kernel(homes_kernel, {1, kHomesThreads, homes_shared_bytes(params.num_physical, params.num_logical)},
                       params, stream);
}

cudaError_t load_homes_kernel(std::size_t shared_limit) {
  const std::size_t most_bytes = homes_shared_bytes(static_cast<int>(kMaxExperts), static_cast<int>(kMaxExperts));
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(homes_kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(std::min(most_bytes, shared_limit)));
}

}  // namespace ferry::cuda
