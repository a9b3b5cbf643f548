/// Functions of the CUDA runtime that the loading of kernels calls, for builds without the runtime.

#include <cuda_runtime_api.h>

#include "emulator/emulator.hpp"

namespace ferry::emulator {

void about_to_launch(const void* /*kernel*/) {}

void launch_grid(cudaStream_t stream, const GridShape& shape, std::function<void()> body) {
  the_machine().launch(stream, shape, std::move(body));
}

}  // namespace ferry::emulator

extern "C" {

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* /*function*/) {
  *attributes = {};
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* /*function*/, cudaFuncAttribute /*attribute*/, int /*value*/) {
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t /*stream*/) { return cudaSuccess; }

}  // extern "C"
