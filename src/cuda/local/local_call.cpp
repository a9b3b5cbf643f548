#include "cuda/local/local_call.hpp"

#include <string>

#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/memory/memory_checks.hpp"

namespace ferry::cuda {

Result<int> device_of(const LocalCall& call) {
  if (call.device >= 0) return call.device;
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) {
    return runtime_status(error, std::string(call.operation) + ": asking for the current GPU");
  }
  return device;
}

Status run_local(const LocalCall& call, const std::function<Status(int device)>& check_memory,
                 const std::function<cudaError_t(int num_sms, cudaStream_t stream)>& launch) {
  const Result<int> found = device_of(call);
  if (!found.ok()) return found.status();
  const int device = *found;
  const DeviceGuard guard(device);
  if (!guard.status().ok()) return guard.status();
  if (Status status = check_memory(device); !status.ok()) return status;
  const auto handle = static_cast<cudaStream_t>(call.stream.handle);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (const cudaError_t error = cudaStreamIsCapturing(handle, &capture); error != cudaSuccess) {
    return runtime_status(error, std::string(call.operation) + ": asking whether the stream is captured");
  }
  // Only if the stream is not captured: a query of the stream's device ends a capture.
  if (capture == cudaStreamCaptureStatusNone) {
    if (Status status = check_stream_device(call.operation, handle, device); !status.ok()) return status;
  }
  int num_sms = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) {
    return runtime_status(error, std::string(call.operation) + ": asking for the number of multiprocessors");
  }
  return runtime_status(launch(num_sms, handle), std::string(call.operation) + ": launching its kernel");
}

}  // namespace ferry::cuda
