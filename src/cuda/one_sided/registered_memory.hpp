#ifndef FERRY_CUDA_ONE_SIDED_REGISTERED_MEMORY_HPP
#define FERRY_CUDA_ONE_SIDED_REGISTERED_MEMORY_HPP

#include <cstddef>
#include <memory>

#include "ferry/status.hpp"

namespace ferry::cuda {

/// Host memory that the GPUs of this process reach at its own address, for as long as any copy of the pointer lives.
/// The memory outlives them. Ranks that are threads of one process may ask for the same memory.
/// @errors kSystem: it cannot be locked; kUnsupported: this GPU sees it elsewhere
Result<std::shared_ptr<std::byte>> register_memory(std::byte* data, std::size_t num_bytes);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_ONE_SIDED_REGISTERED_MEMORY_HPP
