#ifndef FERRY_CUDA_INTRANODE_HOMES_HPP
#define FERRY_CUDA_INTRANODE_HOMES_HPP

/// What tokens pick from, made by a kernel out of a table that the program has in device memory. It runs ahead of the
/// kernels that read ids, in each replay of a graph too.

#include <cuda_runtime_api.h>

#include <memory>

#include "core/backend.hpp"
#include "cuda/intranode/route_params.hpp"
#include "cuda/memory/table_memory.hpp"

namespace ferry::cuda {

struct HomesParams {
  const std::int32_t* physical_to_logical = nullptr;  ///< [P], perhaps wrong
  const std::int32_t* owner = nullptr;                ///< [P]
  int num_physical = 0;
  int num_logical = 0;
  int rank = 0;
  int ranks_per_node = 1;
  bool nearest = true;
  plan::HomeRange* ranges = nullptr;   ///< [E]
  std::int32_t* homes = nullptr;       ///< [P]
  std::int32_t* logical_of = nullptr;  ///< [P]
  HomesCheck* check = nullptr;
};

cudaError_t launch_homes(const HomesParams& params, cudaStream_t stream);
/// Loads the kernel. `shared_limit`: most shared memory of a block on this GPU.
cudaError_t load_homes_kernel(std::size_t shared_limit);

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

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTRANODE_HOMES_HPP
