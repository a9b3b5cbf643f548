#ifndef FERRY_CUDA_INTRANODE_MEMORY_REQUIRED_HPP
#define FERRY_CUDA_INTRANODE_MEMORY_REQUIRED_HPP

#include <cstddef>

#include "ferry/group.hpp"
#include "ferry/status.hpp"

namespace ferry::cuda {

/// Arena bytes that calls hold beyond the fixed part of every group, in whole pages.
struct CallBytes {
  std::size_t routing_bytes = 0;  ///< for one Routing
  std::size_t staging_bytes = 0;
};

/// Number of local experts (L) of a rank of this shape.
std::size_t num_local_experts(const MemoryShape& shape);

/// Bytes of expert locations, in whole pages: for one placement, and for each Routing.
std::size_t placement_bytes(const MemoryShape& shape, const Topology& topology);

/// Bytes of route, dispatch and combine.
CallBytes call_bytes(const MemoryShape& shape);

/// Implements BackendFactory::bytes_required for calls that hold `calls`. Needs no GPU.
Result<std::size_t> bytes_required(const MemoryShape& shape, const Topology& topology, const CallBytes& calls);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTRANODE_MEMORY_REQUIRED_HPP
