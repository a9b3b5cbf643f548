#ifndef FERRY_CUDA_DRIVER_CUDA_CALL_HPP
#define FERRY_CUDA_DRIVER_CUDA_CALL_HPP

/// CUDA's error codes as Status, and two guards that leave the calling thread as they found it.

#include <cuda_runtime_api.h>

#include <string_view>

#include "ferry/status.hpp"

namespace ferry::cuda {

/// Ok, or what `operation` ("allocate: zeroing 4096 bytes") reported; `hint` says what to do about it. kSystem when
/// device memory ran out, kUnsupported where there is no usable driver or GPU, otherwise kCuda. Takes the error off the
/// runtime's own record, so that the caller's next cudaGetLastError does not find ours.
Status cuda_status(cudaError_t error, std::string_view operation, std::string_view hint = {});

/// Makes `device` current on this thread, and later what was current before.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  /// Why `device` could not be made current; ok when it is.
  const Status& status() const { return status_; }

 private:
  Status status_;
  bool pushed_ = false;
};

/// Lets this thread make calls that are forbidden while any thread captures a stream in global mode. What they do is
/// not captured.
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
