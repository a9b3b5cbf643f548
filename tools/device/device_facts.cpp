#include "device/device_facts.hpp"

#include <cuda.h>  // types and attribute numbers only: nothing links the driver

#include <algorithm>
#include <string_view>
#include <tuple>

#include "device/cuda_status.hpp"
#include "device/device_memory.hpp"

namespace ferry::tools {

namespace {

/// Reads an attribute that only the driver has. Its function is looked up at run time, so that this command also starts
/// without a driver.
bool has_file_descriptor_handles(int device) {
  using GetAttribute = CUresult (*)(int*, CUdevice_attribute, CUdevice);
  constexpr unsigned kFirstVersion = 12000;
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuDeviceGetAttribute", &entry, kFirstVersion, cudaEnableDefault, &found);
  static_cast<void>(cudaGetLastError());
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess || entry == nullptr) return false;
  int supported = 0;
  const CUresult result = reinterpret_cast<GetAttribute>(entry)(
      &supported, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device);
  return result == CUDA_SUCCESS && supported != 0;
}

}  // namespace

Result<DeviceFacts> read_device_facts(int device) {
  cudaDeviceProp properties{};
  Status status = cuda_status("cudaGetDeviceProperties", cudaGetDeviceProperties(&properties, device));
  if (!status) return status;
  auto num_devices = count_devices();
  if (!num_devices) return num_devices.status();
  DeviceFacts facts;
  const std::string_view name(properties.name);
  std::copy_n(name.begin(), std::min(name.size(), facts.name.size() - 1), facts.name.begin());
  constexpr int kAddressBytes = static_cast<int>(std::tuple_size_v<decltype(facts.pci_address)>);
  status = cuda_status("cudaDeviceGetPCIBusId", cudaDeviceGetPCIBusId(facts.pci_address.data(), kAddressBytes, device));
  if (!status) return status;
  facts.ordinal = device;
  facts.num_devices = *num_devices;
  facts.compute_major = properties.major;
  facts.compute_minor = properties.minor;
  facts.num_sms = properties.multiProcessorCount;
  facts.memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem);
  facts.l2_bytes = properties.l2CacheSize;
  status = cuda_status("cudaDriverGetVersion", cudaDriverGetVersion(&facts.driver_version));
  if (status) status = cuda_status("cudaRuntimeGetVersion", cudaRuntimeGetVersion(&facts.runtime_version));
  if (!status) return status;
  facts.has_file_descriptor_handles = has_file_descriptor_handles(device);
  return facts;
}

Result<PeerFacts> read_peer_facts(int device, int peer_device) {
  PeerFacts facts;
  const auto read = [&](cudaDeviceP2PAttr attribute, int* value) {
    return cuda_status("cudaDeviceGetP2PAttribute", cudaDeviceGetP2PAttribute(value, attribute, device, peer_device));
  };
  int has_access = 0;
  int has_native_atomics = 0;
  Status status = read(cudaDevP2PAttrAccessSupported, &has_access);
  if (status) status = read(cudaDevP2PAttrNativeAtomicSupported, &has_native_atomics);
  if (status) status = read(cudaDevP2PAttrPerformanceRank, &facts.performance_rank);
  if (!status) return status;
  facts.has_access = has_access != 0;
  facts.has_native_atomics = has_native_atomics != 0;
  return facts;
}

}  // namespace ferry::tools
