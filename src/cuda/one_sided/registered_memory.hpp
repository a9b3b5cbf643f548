#ifndef FERRY_CUDA_ONE_SIDED_REGISTERED_MEMORY_HPP
#define FERRY_CUDA_ONE_SIDED_REGISTERED_MEMORY_HPP

#include <cstddef>
#include <memory>

#include "ferry/status.hpp"

namespace ferry::cuda {

/// Host memory that the GPUs of this process reach at its own address, as long as any copy of the pointer exists. The
/// memory must outlive all copies. Ranks that are threads of one process may register the same memory.
/// @errors kSystem: it cannot be locked; kUnsupported: this GPU sees it at another address
Result<std::shared_ptr<std::byte>> register_memory(std::byte* data, std::size_t num_bytes);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_ONE_SIDED_REGISTERED_MEMORY_HPP
