#ifndef FERRY_CUDA_LATENCY_CODEC_KERNELS_HPP
#define FERRY_CUDA_LATENCY_CODEC_KERNELS_HPP

/// Kernels that differ in what they make of the rows that they send.

#include <cuda_runtime_api.h>

#include <cstddef>

#include "ferry/quantization.hpp"

namespace ferry::cuda {

template <typename Params>
struct CodecKernels {
  using Kernel = void (*)(Params);
  Kernel plain = nullptr;
  Kernel fp8 = nullptr;  ///< with any of its scales
  Kernel int8 = nullptr;

  constexpr Kernel of(Quantization mode) const {
    switch (mode) {
      case Quantization::kNone:
        return plain;
      case Quantization::kInt8:
        return int8;
      case Quantization::kFp8:
      case Quantization::kFp8PowerOfTwo:
      case Quantization::kFp8Ue8m0:
        break;
    }
    return fp8;
  }

  /// `most_shared_bytes`: of any launch.
  cudaError_t load(std::size_t most_shared_bytes) const {
    cudaError_t error = cudaSuccess;
    for (const Kernel kernel : {plain, fp8, int8}) {
      if (error != cudaSuccess) break;
      error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(most_shared_bytes));
    }
    return error;
  }
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LATENCY_CODEC_KERNELS_HPP
