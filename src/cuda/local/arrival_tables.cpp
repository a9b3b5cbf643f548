#include "cuda/local/arrival_tables.hpp"

#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/local/local_call.hpp"
#include "cuda/local/local_ops.hpp"
#include "cuda/memory/memory_checks.hpp"

namespace ferry::cuda {

Status write_arrivals(const LocalCall& call, const plan::ArrivalParams& params) {
  const Result<int> device = device_of(call);
  if (!device.ok()) return device.status();
  const DeviceGuard guard(*device);
  if (!guard.status().ok()) return guard.status();
  if (Status status = check_arrivals_memory(params, *device); !status.ok()) return status;
  return runtime_status(launch_arrivals(params, static_cast<cudaStream_t>(call.stream.handle)),
                        "arrival_tables: launching its kernel");
}

}  // namespace ferry::cuda
