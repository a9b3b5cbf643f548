#ifndef FERRY_CUDA_PLACEMENT_HOMES_HPP
#define FERRY_CUDA_PLACEMENT_HOMES_HPP

/// Homes that tokens pick, built by a kernel from a table that the program has in device memory. The kernel runs before
/// the kernels that read ids, in each replay of a graph too.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/backend.hpp"
#include "cuda/memory/table_memory.hpp"
#include "cuda/placement/homes_params.hpp"

namespace ferry::cuda {

/// The larger one of P and E: no table of experts has more entries. Without homes for all, E may be the larger one.
inline std::int64_t most_experts_of(const RouteCall& call) {
  const std::int64_t num_logical = call.placement ? call.placement->num_logical_experts : 0;
  return std::max(call.options.num_experts, num_logical);
}

/// Homes of a call whose placement is in GPU memory; empty for other calls.
struct BuiltHomes {
  std::shared_ptr<std::byte> memory{};  ///< held as long as kernels may read the homes
  HomesParams params{};

  bool present() const { return memory != nullptr; }
  HomeTables tables() const {
    return {params.ranges, params.homes, params.logical_of, params.num_logical, params.check};
  }
  cudaError_t launch(cudaStream_t stream) const { return present() ? launch_homes(params, stream) : cudaSuccess; }
};

struct HomesOf {
  int rank = 0;  ///< rank in the group
  int ranks_per_node = 1;
  const std::int32_t* owner = nullptr;  ///< [P] in device memory
};
Result<BuiltHomes> prepare_homes(const RouteCall& call, TableMemory& memory, const HomesOf& of);
/// Bytes of memory that prepare_homes takes.
std::size_t built_homes_bytes(std::size_t num_physical, std::size_t num_logical);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_PLACEMENT_HOMES_HPP
