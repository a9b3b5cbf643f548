#ifndef FERRY_CUDA_DRIVER_DEVICE_GUARD_HPP
#define FERRY_CUDA_DRIVER_DEVICE_GUARD_HPP

#include "ferry/status.hpp"

namespace ferry::cuda {

/// Makes `device` current on this thread, and restores what was current before.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  /// Why `device` could not be made current; ok when it is.
  const Status& status() const { return status_; }

 private:
  void enter(int device);

  Status status_;
  bool pushed_ = false;
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_DRIVER_DEVICE_GUARD_HPP
