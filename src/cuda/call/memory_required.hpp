#ifndef FERRY_CUDA_CALL_MEMORY_REQUIRED_HPP
#define FERRY_CUDA_CALL_MEMORY_REQUIRED_HPP

#include <cstddef>

#include "ferry/group.hpp"
#include "ferry/status.hpp"

namespace ferry::cuda {

/// What calls hold of the arena beside what every group does. In whole pages.
struct CallBytes {
  std::size_t routing_bytes = 0;  ///< of one Routing
  std::size_t staging_bytes = 0;
};

/// L of a rank of this shape.
std::size_t num_local_experts(const MemoryShape& shape);

/// Of where experts are, in whole pages: of one placement, and of each Routing.
std::size_t placement_bytes(const MemoryShape& shape, const Topology& topology);

/// Of route, dispatch and combine.
CallBytes call_bytes(const MemoryShape& shape);

/// BackendFactory::bytes_required for calls that hold this much. Needs no GPU.
Result<std::size_t> bytes_required(const MemoryShape& shape, const Topology& topology, const CallBytes& calls);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_CALL_MEMORY_REQUIRED_HPP
