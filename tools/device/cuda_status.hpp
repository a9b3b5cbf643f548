#ifndef FERRY_TOOLS_DEVICE_CUDA_STATUS_HPP
#define FERRY_TOOLS_DEVICE_CUDA_STATUS_HPP

/// Status of CUDA calls, for the files that call CUDA.

#include <cuda_runtime_api.h>

#include <string>

#include "ferry/status.hpp"

namespace ferry::tools {

/// Result of a call of the CUDA runtime. Clears the error, so that it does not affect the next call.
inline Status cuda_status(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return {};
  static_cast<void>(cudaGetLastError());
  const std::string text = std::string(what) + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")";
  if (error == cudaErrorMemoryAllocation) {
    return {ErrorCode::kSystem, text + "; use fewer tokens or a smaller hidden size, or free memory of the GPU"};
  }
  return {ErrorCode::kCuda, text + "; run `ferry doctor` to see what this machine's GPUs offer"};
}

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEVICE_CUDA_STATUS_HPP
