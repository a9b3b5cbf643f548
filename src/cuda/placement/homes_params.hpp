#ifndef FERRY_CUDA_PLACEMENT_HOMES_PARAMS_HPP
#define FERRY_CUDA_PLACEMENT_HOMES_PARAMS_HPP

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cuda/placement/placement_tables.hpp"

namespace ferry::cuda {

/// Parameters of the kernel that builds the homes from a table in device memory.
struct HomesParams {
  const std::int32_t* physical_to_logical = nullptr;  ///< [P], perhaps wrong
  const std::int32_t* owner = nullptr;                ///< [P]
  int num_physical = 0;
  int num_logical = 0;
  int rank = 0;
  int ranks_per_node = 1;
  bool nearest = true;
  bool allow_homeless = false;         ///< an expert without a home is no fault
  plan::HomeRange* ranges = nullptr;   ///< [E]
  std::int32_t* homes = nullptr;       ///< [P]
  std::int32_t* logical_of = nullptr;  ///< [P]
  HomesCheck* check = nullptr;
};

cudaError_t launch_homes(const HomesParams& params, cudaStream_t stream);
/// Loads the kernel. `shared_limit`: most shared memory of a block on this GPU.
cudaError_t load_homes_kernel(std::size_t shared_limit);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_PLACEMENT_HOMES_PARAMS_HPP
