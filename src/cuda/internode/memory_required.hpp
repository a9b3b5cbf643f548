#ifndef FERRY_CUDA_INTERNODE_MEMORY_REQUIRED_HPP
#define FERRY_CUDA_INTERNODE_MEMORY_REQUIRED_HPP

#include <cstddef>

#include "cuda/call/memory_required.hpp"
#include "ferry/group.hpp"
#include "ferry/status.hpp"

namespace ferry::cuda::internode {

/// Implements BackendFactory::bytes_required for groups of several nodes: the bytes that any routing of this shape may
/// need, since the shape does not give the number of tokens for other nodes. `latency`: what calls of latency mode hold
/// in place of the others; null: no such calls. Needs no GPU.
/// @errors kUnsupported: more ranks of a node, or nodes, than this backend connects
Result<std::size_t> bytes_required(const MemoryShape& shape, const Topology& topology, const CallBytes* latency);

}  // namespace ferry::cuda::internode

#endif  // FERRY_CUDA_INTERNODE_MEMORY_REQUIRED_HPP
