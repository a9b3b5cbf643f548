#ifndef FERRY_CUDA_INTERNODE_MEMORY_REQUIRED_HPP
#define FERRY_CUDA_INTERNODE_MEMORY_REQUIRED_HPP

#include <cstddef>

#include "ferry/group.hpp"
#include "ferry/status.hpp"

namespace ferry::cuda::internode {

/// BackendFactory::bytes_required for groups of several nodes: as much as any routing of this shape needs, as what goes
/// to other nodes is not said. Needs no GPU.
/// @errors kUnsupported: more ranks of a node, or nodes, than this backend connects
Result<std::size_t> bytes_required(const MemoryShape& shape, const Topology& topology);

}  // namespace ferry::cuda::internode

#endif  // FERRY_CUDA_INTERNODE_MEMORY_REQUIRED_HPP
