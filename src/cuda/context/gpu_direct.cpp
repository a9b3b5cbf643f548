#include "cuda/context/gpu_direct.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <string>

#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/driver/driver.hpp"
#include "ferry/group.hpp"

namespace ferry::cuda {
namespace {

constexpr const char* kName = "gpu";

bool has(const Driver& table, CUdevice device, CUdevice_attribute attribute) {
  int value = 0;
  return table.device_get_attribute(&value, attribute, device) == CUDA_SUCCESS && value != 0;
}

/// How writes of a card become visible to kernels (CUGPUDirectRDMAWritesOrdering).
std::string describe_order(const Driver& table, CUdevice device) {
  return has(table, device, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)
             ? "cards' writes arrive in order"
             : "cards' writes do not arrive in order, so peers read them back";
}

/// Allocates a little of such memory: a sandbox or a virtual GPU may refuse it despite the attribute.
Status try_memory(const Driver& table, int device) {
  const DeviceGuard guard(device);
  if (!guard.status().ok()) return guard.status();
  const RelaxedCapture relaxed;
  const Result<std::size_t> granularity = allocation_granularity(device);
  if (!granularity.ok()) return granularity.status();
  CUmemAllocationProp properties = shareable_memory(device);
  properties.allocFlags.gpuDirectRDMACapable = 1;
  CUmemGenericAllocationHandle memory = 0;
  const CUresult created = table.mem_create(&memory, *granularity, &properties, 0);
  if (created == CUDA_SUCCESS) table.mem_release(memory);
  // A shortage of memory does not show that this kind is refused.
  if (created == CUDA_ERROR_OUT_OF_MEMORY) return {};
  return driver_status(created, "taking memory that network cards can reach");
}

GpuDirectFact registration_fact(const Driver& table, CUdevice handle, int device) {
  if (!has(table, handle, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)) {
    return {kName, false, fmt::format("GPU {} cannot be registered with network cards", device),
            "data-centre and workstation GPUs can"};
  }
  if (const Status status = try_memory(table, device); !status.ok()) {
    return {kName, false, std::string(status.message()), "loosen the sandbox, or give it a whole GPU"};
  }
  return {kName, true,
          fmt::format("GPU {} can be registered with network cards; {}", device, describe_order(table, handle)), ""};
}

}  // namespace

rail::GpuPart gpu_direct_part(int device) {
  constexpr const char* kDriverAdvice = "run nvidia-smi to see whether the driver works";
  int ordinal = device;
  Status status;
  if (device == kCurrentDevice) status = runtime_status(cudaGetDevice(&ordinal), "asking for the current GPU");
  const Result<const Driver*> table = driver();
  if (status.ok()) status = table.status();
  CUdevice handle = 0;
  if (status.ok()) status = driver_status((*table)->device_get(&handle, ordinal), "looking for the GPU");
  if (!status.ok()) return {{kName, false, std::string(status.message()), kDriverAdvice}, false};
  rail::GpuPart part;
  part.has_dma_buf = has(**table, handle, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED);
  part.registration = registration_fact(**table, handle, ordinal);
  return part;
}

}  // namespace ferry::cuda
