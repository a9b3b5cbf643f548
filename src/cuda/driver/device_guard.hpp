#ifndef FERRY_CUDA_DRIVER_DEVICE_GUARD_HPP
#define FERRY_CUDA_DRIVER_DEVICE_GUARD_HPP

#include "ferry/status.hpp"

namespace ferry::cuda {

/// Makes `device` current on this thread and restores the previous device on destruction.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  /// Reason why `device` could not be made current; ok if it is current.
  const Status& status() const { return status_; }

 private:
  void enter(int device);

  Status status_;
  bool pushed_ = false;
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_DRIVER_DEVICE_GUARD_HPP
