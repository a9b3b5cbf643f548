#ifndef FERRY_CUDA_PLACEMENT_HOMES_HPP
#define FERRY_CUDA_PLACEMENT_HOMES_HPP

/// What tokens pick from, made by a kernel out of a table that the program has in device memory. It runs ahead of the
/// kernels that read ids, in each replay of a graph too.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>

#include "core/backend.hpp"
#include "cuda/memory/table_memory.hpp"
#include "cuda/placement/homes_params.hpp"

namespace ferry::cuda {

/// Of a call whose placement only the GPU knows, otherwise nothing.
struct BuiltHomes {
  std::shared_ptr<std::byte> memory{};  ///< as long as kernels may read them
  HomesParams params{};

  bool present() const { return memory != nullptr; }
  HomeTables tables() const {
    return {params.ranges, params.homes, params.logical_of, params.num_logical, params.check};
  }
  cudaError_t launch(cudaStream_t stream) const { return present() ? launch_homes(params, stream) : cudaSuccess; }
};

struct HomesOf {
  int rank = 0;  ///< of the group
  int ranks_per_node = 1;
  const std::int32_t* owner = nullptr;  ///< [P] in device memory
};
Result<BuiltHomes> prepare_homes(const RouteCall& call, TableMemory& memory, const HomesOf& of);
/// What that takes of the memory.
std::size_t built_homes_bytes(std::size_t num_physical, std::size_t num_logical);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_PLACEMENT_HOMES_HPP
