#ifndef FERRY_CUDA_LATENCY_KERNEL_ROW_HPP
#define FERRY_CUDA_LATENCY_KERNEL_ROW_HPP

/// Rows of the table of kernels (kernels.hpp), and the one way to load and launch them. For .cu files.

#include <cuda_runtime_api.h>

#include <cstddef>

#include "cuda/driver/launch.hpp"
#include "ferry/quantization.hpp"

namespace ferry::cuda {

/// Kernels that take the same parameters and are launched alike.
template <typename Params, int kNum = 1>
struct KernelRow {
  void (*kernels[kNum])(Params);
  unsigned num_threads;
  std::size_t (*shared_bytes)(const Params&);  ///< dynamic shared memory of a launch; null: none
  /// Largest dynamic shared memory of any launch, for which the kernels are loaded; null: at most the 48 KiB that any
  /// kernel may have.
  std::size_t (*most_shared_bytes)() = nullptr;

  cudaError_t load() const {
    for (const auto kernel : kernels) {
      const auto* const address = reinterpret_cast<const void*>(kernel);
      cudaFuncAttributes attributes;
      const cudaError_t error = most_shared_bytes == nullptr
                                    ? cudaFuncGetAttributes(&attributes, address)
                                    : cudaFuncSetAttribute(address, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                           static_cast<int>(most_shared_bytes()));
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }

  /// `idx`: which of the kernels. `overlaps`: LaunchShape::overlaps.
  cudaError_t launch(int idx, int num_blocks, bool overlaps, const Params& params, cudaStream_t stream) const {
    const std::size_t bytes = shared_bytes == nullptr ? 0 : shared_bytes(params);
    return launch_kernel(kernels[idx], {static_cast<unsigned>(num_blocks), num_threads, bytes, overlaps}, params,
                         stream);
  }
};

/// Loads the kernels of all rows, up to the first error.
template <typename... Rows>
cudaError_t load_rows(const Rows&... rows) {
  cudaError_t error = cudaSuccess;
  ((error = error == cudaSuccess ? rows.load() : error), ...);
  return error;
}

/// Kernels that quantise rows in one of three ways: device::Codec.
inline constexpr int kNumCodecs = 3;
constexpr int codec_idx(Quantization mode) {
  switch (mode) {
    case Quantization::kNone:
      return 0;
    case Quantization::kInt8:
      return 2;
    case Quantization::kFp8:
    case Quantization::kFp8PowerOfTwo:
    case Quantization::kFp8Ue8m0:
      break;
  }
  return 1;
}

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LATENCY_KERNEL_ROW_HPP
