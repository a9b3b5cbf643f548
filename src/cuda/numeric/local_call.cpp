#include "cuda/numeric/local_call.hpp"

#include <string>

#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/memory/memory_checks.hpp"

namespace ferry::cuda {

Status run_local(std::string_view operation, const LocalPlace& place,
                 const std::function<Status(int device)>& check_memory,
                 const std::function<cudaError_t(int num_sms, cudaStream_t stream)>& launch) {
  int device = place.device;
  if (device < 0) {
    const cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) {
      return runtime_status(error, std::string(operation) + ": asking for the current GPU");
    }
  }
  const DeviceGuard guard(device);
  if (!guard.status().ok()) return guard.status();
  if (Status status = check_memory(device); !status.ok()) return status;
  const auto handle = static_cast<cudaStream_t>(place.stream.handle);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (const cudaError_t error = cudaStreamIsCapturing(handle, &capture); error != cudaSuccess) {
    return runtime_status(error, std::string(operation) + ": asking whether the stream is captured");
  }
  // Not of a captured stream: asking that one for its device ends the capture.
  if (capture == cudaStreamCaptureStatusNone) {
    if (Status status = check_stream_device(operation, handle, device); !status.ok()) return status;
  }
  int num_sms = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) {
    return runtime_status(error, std::string(operation) + ": asking for the number of multiprocessors");
  }
  return runtime_status(launch(num_sms, handle), std::string(operation) + ": launching its kernel");
}

}  // namespace ferry::cuda
