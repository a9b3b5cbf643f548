#ifndef FERRY_CUDA_CONTEXT_GPU_DIRECT_HPP
#define FERRY_CUDA_CONTEXT_GPU_DIRECT_HPP

#include "rail/ring_memory.hpp"

namespace ferry::cuda {

/// The driver's information on memory of `device` (-1: the current GPU) and network cards.
rail::GpuPart gpu_direct_part(int device);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_CONTEXT_GPU_DIRECT_HPP
