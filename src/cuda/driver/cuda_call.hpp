#ifndef FERRY_CUDA_DRIVER_CUDA_CALL_HPP
#define FERRY_CUDA_DRIVER_CUDA_CALL_HPP

/// Calls of the CUDA runtime: error codes as Status, and calls while streams are captured.

#include <cuda_runtime_api.h>

#include <string_view>

#include "ferry/status.hpp"

namespace ferry::cuda {

/// Ok, or the error of `operation` ("allocate: zeroing 4096 bytes"); `hint`: advice on how to avoid it. kSystem if
/// device memory ran out, kUnsupported if there is no usable driver or GPU, otherwise kCuda. Clears the runtime's own
/// record of the error, so that the caller's next cudaGetLastError does not return Ferry's.
Status runtime_status(cudaError_t error, std::string_view operation, std::string_view hint = {});

/// Lets this thread make calls that are forbidden while any thread captures a stream in global mode. The calls are not
/// captured.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode former_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_DRIVER_CUDA_CALL_HPP
