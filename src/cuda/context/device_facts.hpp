#ifndef FERRY_CUDA_CONTEXT_DEVICE_FACTS_HPP
#define FERRY_CUDA_CONTEXT_DEVICE_FACTS_HPP

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "ferry/status.hpp"

namespace ferry::cuda {

/// A rank's GPU.
struct DeviceFacts {
  int device = 0;
  int num_sms = 0;
  std::size_t shared_limit = 0;
  std::string name;
  std::string pci_address;  ///< empty if the driver does not report it
  cudaUUID_t uuid{};
};

/// Facts about GPU `wanted`, or about the current one (kCurrentDevice).
/// @errors kInvalidArgument: this process sees no such GPU; kUnsupported: it is too old; kCuda
Result<DeviceFacts> examine_device(int wanted);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_CONTEXT_DEVICE_FACTS_HPP
