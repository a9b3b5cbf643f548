#include "cuda/memory/card_memory.hpp"

#include <fmt/format.h>

#include <utility>

#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/driver/driver.hpp"

namespace ferry::cuda {
namespace {

constexpr std::string_view kHint =
    "`ferry doctor` shows what GPUDirect needs; or set GroupOptions::ring_memory to host";

/// One mapping; the destructor undoes the steps that succeeded.
class Mapping {
 public:
  Mapping(const Driver& table, int device) : table_(table), device_(device) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    const DeviceGuard guard(device_);
    if (!guard.status().ok()) return;  // the process is ending
    const RelaxedCapture relaxed;
    if (mapped_) table_.mem_unmap(address_, size_bytes_);
    if (handle_ != 0) table_.mem_release(handle_);
    if (address_ != 0) table_.mem_address_free(address_, size_bytes_);
  }

  Status make(std::size_t bytes, std::string_view operation) {
    const DeviceGuard guard(device_);
    if (!guard.status().ok()) return guard.status();
    const RelaxedCapture relaxed;
    const Result<std::size_t> granularity = allocation_granularity(device_);
    if (!granularity.ok()) return granularity.status();
    size_bytes_ = (bytes + *granularity - 1) / *granularity * *granularity;
    CUmemAllocationProp properties = shareable_memory(device_);
    properties.allocFlags.gpuDirectRDMACapable = 1;
    const auto step = [this, operation](CUresult result, std::string_view what) {
      return driver_status(
          result, fmt::format("{}: {} {} bytes of GPU {} for the network", operation, what, size_bytes_, device_),
          kHint);
    };
    Status status = step(table_.mem_create(&handle_, size_bytes_, &properties, 0), "taking");
    if (!status.ok()) handle_ = 0;
    if (status.ok()) {
      status = step(table_.mem_address_reserve(&address_, size_bytes_, *granularity, 0, 0), "reserving addresses of");
      if (!status.ok()) address_ = 0;
    }
    if (status.ok()) {
      status = step(table_.mem_map(address_, size_bytes_, 0, handle_, 0), "mapping");
      mapped_ = status.ok();
    }
    if (status.ok()) {
      const CUmemAccessDesc access = access_from(device_);
      status = step(table_.mem_set_access(address_, size_bytes_, &access, 1), "giving access to");
    }
    return status;
  }

  std::byte* data() const { return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address_)); }

 private:
  const Driver& table_;
  int device_;
  std::size_t size_bytes_ = 0;
  CUmemGenericAllocationHandle handle_ = 0;
  CUdeviceptr address_ = 0;
  bool mapped_ = false;
};

}  // namespace

Result<std::shared_ptr<std::byte>> take_card_memory(int device, std::size_t bytes, std::string_view operation) {
  const Result<const Driver*> table = driver();
  if (!table.ok()) return table.status();
  auto mapping = std::make_shared<Mapping>(**table, device);
  if (Status status = mapping->make(bytes, operation); !status.ok()) return status;
  std::byte* const data = mapping->data();
  return std::shared_ptr<std::byte>(std::move(mapping), data);
}

Result<bool> cards_write_in_order(int device) {
  const Result<const Driver*> table = driver();
  if (!table.ok()) return table.status();
  CUdevice handle = 0;
  int order = 0;
  Status status = driver_status((*table)->device_get(&handle, device), "Group::create: looking for the GPU");
  if (status.ok()) {
    status = driver_status(
        (*table)->device_get_attribute(&order, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING, handle),
        "Group::create: asking how cards' writes are ordered");
  }
  if (!status.ok()) return status;
  return order >= CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER;
}

}  // namespace ferry::cuda
