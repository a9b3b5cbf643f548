#include "cuda/driver/device_guard.hpp"

#include <fmt/format.h>

#include "cuda/driver/driver.hpp"

namespace ferry::cuda {

// Not cudaSetDevice: restoring a device that the thread never used would create a context there, which takes hundreds
// of megabytes of that device's memory.
DeviceGuard::DeviceGuard(int device) {
  // A thread whose current device is that of the group needs no change.
  const Driver* const known = loaded_driver();
  const CUcontext wanted = known_primary_context(device);
  CUcontext current = nullptr;
  if (known != nullptr && wanted != nullptr && known->ctx_get_current(&current) == CUDA_SUCCESS && current == wanted) {
    return;
  }
  enter(device);
}

void DeviceGuard::enter(int device) {
  Result<const Driver*> table = driver();
  Result<CUcontext> context = primary_context(device);
  if (!table.ok() || !context.ok()) {
    status_ = table.ok() ? context.status() : table.status();
    return;
  }
  CUcontext current = nullptr;
  if ((*table)->ctx_get_current(&current) == CUDA_SUCCESS && current == *context) return;
  status_ = driver_status((*table)->ctx_push_current(*context), fmt::format("making GPU {} current", device));
  pushed_ = status_.ok();
}

DeviceGuard::~DeviceGuard() {
  if (!pushed_) return;
  CUcontext popped = nullptr;
  if (Result<const Driver*> table = driver(); table.ok()) (*table)->ctx_pop_current(&popped);
}

}  // namespace ferry::cuda
