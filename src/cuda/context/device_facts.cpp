#include "cuda/context/device_facts.hpp"

#include <fmt/format.h>

#include <array>

#include "cuda/driver/cuda_call.hpp"
#include "ferry/group.hpp"

namespace ferry::cuda {
namespace {

/// Oldest architecture with system-scope release and acquire (PTX ISA, "Memory Consistency Model": sm_70), and with
/// kernels in this build.
constexpr int kMinComputeMajor = 8;

}  // namespace

Result<DeviceFacts> examine_device(int wanted) {
  DeviceFacts facts;
  int num_devices = 0;
  Status status = runtime_status(cudaGetDeviceCount(&num_devices), "Group::create: counting GPUs");
  if (status.ok() && wanted == kCurrentDevice) {
    status = runtime_status(cudaGetDevice(&facts.device), "Group::create: asking for the current GPU");
  } else {
    facts.device = wanted;
  }
  if (!status.ok()) return status;
  if (facts.device < 0 || facts.device >= num_devices) {
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("Group::create: GroupOptions::device is {}, expected {} (the current one) or 0 to {}: this "
                    "process sees {} GPUs",
                    wanted, kCurrentDevice, num_devices - 1, num_devices));
  }
  cudaDeviceProp properties{};
  status = runtime_status(cudaGetDeviceProperties(&properties, facts.device), "Group::create: examining the GPU");
  if (!status.ok()) return status;
  if (properties.major < kMinComputeMajor) {
    return Status(ErrorCode::kUnsupported,
                  fmt::format("Group::create: GPU {} ({}) has compute capability {}.{}, expected at least {}.0; use "
                              "backend \"cpu\"",
                              facts.device, properties.name, properties.major, properties.minor, kMinComputeMajor));
  }
  facts.num_sms = properties.multiProcessorCount;
  facts.shared_limit = properties.sharedMemPerBlockOptin;
  facts.name = properties.name;
  facts.uuid = properties.uuid;
  constexpr int kPciAddressBytes = 32;  // "0000:00:00.0" needs 13
  std::array<char, kPciAddressBytes> address{};
  // It only helps to choose a network card.
  if (cudaDeviceGetPCIBusId(address.data(), kPciAddressBytes, facts.device) == cudaSuccess) {
    facts.pci_address = address.data();
  } else {
    cudaGetLastError();
  }
  return facts;
}

}  // namespace ferry::cuda
