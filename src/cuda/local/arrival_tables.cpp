#include "cuda/local/arrival_tables.hpp"

#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/memory/memory_checks.hpp"

namespace ferry::cuda {

Status write_arrivals(const plan::ArrivalParams& params, int device, Stream stream) {
  if (device < 0) {
    const cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return runtime_status(error, "arrival_tables: asking for the current GPU");
  }
  const DeviceGuard guard(device);
  if (!guard.status().ok()) return guard.status();
  if (Status status = check_arrivals_memory(params, device); !status.ok()) return status;
  return runtime_status(launch_arrivals(params, static_cast<cudaStream_t>(stream.handle)),
                        "arrival_tables: launching its kernel");
}

}  // namespace ferry::cuda
