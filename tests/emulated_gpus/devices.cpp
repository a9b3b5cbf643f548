/// Devices, attributes of kernels, and errors of the CUDA runtime.

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string_view>
#include <thread>
#include <utility>

#include "emulated_gpus/driver_functions.hpp"
#include "emulated_gpus/host.hpp"

namespace ferry::emulated {
namespace {

constexpr std::chrono::milliseconds kLoadingTime{2};

/// Kernels that were launched or queried.
struct LoadedKernels {
  std::mutex mutex;
  std::set<const void*> kernels;  ///< guarded by `mutex`
  int num_by_launches = 0;        ///< guarded by `mutex`
};

LoadedKernels& loaded_kernels() {
  static auto* const loaded = new LoadedKernels;
  return *loaded;
}

bool loads_eagerly() {
  static const bool eagerly = [] {
    const char* const text = std::getenv("CUDA_MODULE_LOADING");
    return text != nullptr && std::string_view(text) == "EAGER";
  }();
  return eagerly;
}

/// Loading may wait for all work of the GPU. The emulation always waits, also for work that other threads queue
/// meanwhile (CUDA C++ Programming Guide, "Lazy Loading").
void load(const void* kernel, bool by_launch) {
  LoadedKernels& loaded = loaded_kernels();
  {
    const std::lock_guard lock(loaded.mutex);
    if (!loaded.kernels.insert(kernel).second) return;
    if (by_launch) ++loaded.num_by_launches;
  }
  if (loads_eagerly()) return;
  std::this_thread::sleep_for(kLoadingTime);
  finish_all_streams();
}

}  // namespace

int num_kernels_loaded_by_launches() {
  LoadedKernels& loaded = loaded_kernels();
  const std::lock_guard lock(loaded.mutex);
  return loaded.num_by_launches;
}

}  // namespace ferry::emulated

using namespace ferry::emulated;  // NOLINT(google-build-using-namespace)

void ferry::emulator::about_to_launch(const void* kernel) { load(kernel, true); }

// The names are CUDA's.
// NOLINTBEGIN(readability-identifier-naming)
extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = num_devices();
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return result(set_device(device)); }
cudaError_t cudaDeviceSynchronize() {
  if (!may_call_uncaptured()) return result(cudaErrorStreamCaptureUnsupported);
  finish_all_streams();
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer ? 1 : 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int /*peer*/, unsigned /*flags*/) { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
  *value = 1;
  if (attribute == cudaDevAttrMultiProcessorCount) *value = num_sms();
  if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin) *value = kSharedBytesPerBlock;
  if (attribute == cudaDevAttrComputeCapabilityMajor) *value = kComputeMajor;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr /*attribute*/, int /*device*/, int /*peer*/) {
  *value = 1;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* address, int size, int device) {
  std::snprintf(address, static_cast<std::size_t>(size), "0000:%02x:00.0", 1 + device);
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {};
  std::strncpy(properties->name, "emulated GPU", sizeof(properties->name) - 1);
  properties->uuid = uuid_of(device);
  properties->major = kComputeMajor;
  properties->multiProcessorCount = num_sms();
  properties->sharedMemPerBlockOptin = kSharedBytesPerBlock;
  properties->totalGlobalMem = kMemoryBytes;
  properties->canMapHostMemory = properties->unifiedAddressing = 1;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  load(kernel, false);
  *attributes = {};
  attributes->ptxVersion = attributes->binaryVersion = 10 * kComputeMajor;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute /*attribute*/, int /*value*/) {
  load(kernel, false);
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return std::exchange(last_error(), cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error(); }
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorStreamCaptureUnsupported:
      return "cudaErrorStreamCaptureUnsupported";
    default:
      return "an error of emulated GPUs";
  }
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned /*version*/,
                                             unsigned long long /*flags*/, cudaDriverEntryPointQueryResult* found) {
  *function = driver_function(name);
  *found = *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // extern "C"
// NOLINTEND(readability-identifier-naming)
