#include "cuda/context/gpu_direct.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <string>

#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/driver.hpp"
#include "ferry/group.hpp"

namespace ferry::cuda {
namespace {

constexpr const char* kName = "gpu";

bool has(const Driver& table, CUdevice device, CUdevice_attribute attribute) {
  int value = 0;
  return table.device_get_attribute(&value, attribute, device) == CUDA_SUCCESS && value != 0;
}

/// How what a card wrote becomes visible to kernels (CUflushGPUDirectRDMAWritesOptions, CUGPUDirectRDMAWritesOrdering).
std::string describe_order(const Driver& table, CUdevice device) {
  if (has(table, device, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)) return "cards' writes arrive in order";
  return has(table, device, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)
             ? "cards' writes need a flush, which the driver offers"
             : "cards' writes need a flush";
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
  const bool registers = has(**table, handle, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
  part.registration = {kName, registers,
                       registers ? fmt::format("GPU {} can be registered with network cards; {}", ordinal,
                                               describe_order(**table, handle))
                                 : fmt::format("GPU {} cannot be registered with network cards", ordinal),
                       registers ? "" : "data-centre and workstation GPUs can"};
  return part;
}

}  // namespace ferry::cuda
