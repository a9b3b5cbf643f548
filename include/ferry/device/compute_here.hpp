#ifndef FERRY_DEVICE_COMPUTE_HERE_HPP
#define FERRY_DEVICE_COMPUTE_HERE_HPP

#include "ferry/device/host_device.hpp"

namespace ferry::device {

/// Makes the compiler compute an address here (before a barrier, for example), not after it where the address is used.
template <typename T>
FERRY_DEVICE inline void compute_here(T*& address) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+l"(address));
#else
  static_cast<void>(address);
#endif
}

}  // namespace ferry::device

#endif  // FERRY_DEVICE_COMPUTE_HERE_HPP
