#ifndef FERRY_CUDA_INTRANODE_MEMORY_REQUIRED_HPP
#define FERRY_CUDA_INTRANODE_MEMORY_REQUIRED_HPP

#include <cstddef>

#include "ferry/group.hpp"
#include "ferry/status.hpp"

namespace ferry::cuda {

/// BackendFactory::bytes_required. Needs no GPU.
Result<std::size_t> bytes_required(const MemoryShape& shape, const Topology& topology);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTRANODE_MEMORY_REQUIRED_HPP
