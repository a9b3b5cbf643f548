#ifndef FERRY_CUDA_ONE_SIDED_BACKEND_HPP
#define FERRY_CUDA_ONE_SIDED_BACKEND_HPP

#include "one_sided/backend.hpp"

namespace ferry::cuda {

/// Symmetric memory of ranks with GPUs. Calls are kernels on the caller's stream.
one_sided::BackendFactory one_sided_backend_factory();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_ONE_SIDED_BACKEND_HPP
