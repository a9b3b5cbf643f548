#include "cuda/memory/peer_mapping.hpp"

#include <fmt/format.h>

#include <string_view>

#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/driver/driver.hpp"

namespace ferry::cuda {
namespace {

constexpr std::string_view kReachHint =
    "the GPUs need peer-to-peer access to each other (nvidia-smi topo -p2p rw), and containers must let processes "
    "share "
    "device memory";

}  // namespace

Result<std::unique_ptr<PeerMapping>> PeerMapping::create(int device, MemoryPath path, std::size_t size_bytes) {
  if (size_bytes == 0 || size_bytes > kMaxDeviceArenaBytes) {
    return Status(ErrorCode::kTransport,
                  fmt::format("mapping a peer's arena: it announced {} bytes, expected 1 to {}; run the same build on "
                              "every rank",
                              size_bytes, kMaxDeviceArenaBytes));
  }
  auto mapping = std::make_unique<PeerMapping>(Private{}, device, path, size_bytes);
  if (path == MemoryPath::kIpc) return mapping;
  const DeviceGuard guard(device);
  if (!guard.status().ok()) return guard.status();
  const RelaxedCapture relaxed;
  const Result<const Driver*> table = driver();
  const Result<std::size_t> granularity = allocation_granularity(device);
  if (!granularity.ok()) return granularity.status();
  mapping->granularity_ = *granularity;
  if (size_bytes % *granularity != 0) {
    return Status(
        ErrorCode::kUnsupported,
        fmt::format("mapping a peer's arena: its {} bytes are no multiple of the {} that GPU {} maps at once; "
                    "use GPUs of one kind",
                    size_bytes, *granularity, device));
  }
  CUdeviceptr reserved = 0;
  Status status = driver_status((*table)->mem_address_reserve(&reserved, size_bytes, *granularity, 0, 0),
                                fmt::format("mapping a peer's arena: reserving {} bytes of addresses", size_bytes),
                                "lower GroupOptions::arena_bytes or raise the address-space limit (ulimit -v)");
  if (!status.ok()) return status;
  mapping->base_.store(reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(reserved)), std::memory_order_release);
  return mapping;
}

PeerMapping::~PeerMapping() {
  if (base() == nullptr) return;
  const DeviceGuard guard(device_);
  if (!guard.status().ok()) return;
  const RelaxedCapture relaxed;
  if (path_ == MemoryPath::kIpc) {
    cudaIpcCloseMemHandle(base());
    return;
  }
  while (!chunks_.empty()) unmap_newest();
  if (const Result<const Driver*> table = driver(); table.ok())
    (*table)->mem_address_free(device_address(base()), size_bytes_);
}

Status PeerMapping::add(const ArenaChunk& chunk) {
  const std::size_t next = chunks_.empty() ? 0 : chunks_.back().offset + chunks_.back().size_bytes;
  const bool whole = path_ == MemoryPath::kVmm || chunk.size_bytes == size_bytes_;
  if (chunk.offset != next || chunk.size_bytes == 0 || chunk.size_bytes > size_bytes_ - next ||
      chunk.size_bytes % granularity_ != 0 || !whole || (path_ == MemoryPath::kVmm && chunk.fd < 0)) {
    return Status(
        ErrorCode::kTransport,
        fmt::format("mapping a peer's arena: it announced bytes [{}, +{}) {} a descriptor, expected a multiple "
                    "of {} bytes from {} on, inside {}; run the same build on every rank",
                    chunk.offset, chunk.size_bytes, chunk.fd < 0 ? "without" : "with", granularity_, next,
                    size_bytes_));
  }
  const DeviceGuard guard(device_);
  if (!guard.status().ok()) return guard.status();
  const RelaxedCapture relaxed;
  chunks_.reserve(chunks_.size() + 1);
  Status status = path_ == MemoryPath::kVmm ? add_vmm(chunk) : add_ipc(chunk);
  if (status.ok()) chunks_.push_back(Extent{chunk.offset, chunk.size_bytes});
  return status;
}

Status PeerMapping::add_vmm(const ArenaChunk& chunk) {
  const Result<const Driver*> table = driver();
  CUmemGenericAllocationHandle handle = 0;
  void* os_handle = reinterpret_cast<void*>(static_cast<std::uintptr_t>(chunk.fd));
  Status status = driver_status(
      (*table)->mem_import_from_shareable_handle(&handle, os_handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
      fmt::format("importing {} bytes on GPU {}", chunk.size_bytes, device_), kReachHint);
  if (!status.ok()) return status;
  status = map_handle(handle, chunk.offset, chunk.size_bytes);
  // The mapping keeps the memory alive.
  (*table)->mem_release(handle);
  return status;
}

Status PeerMapping::map_handle(CUmemGenericAllocationHandle handle, std::size_t offset, std::size_t size_bytes) {
  const Result<const Driver*> table = driver();
  const CUdeviceptr where = device_address(base() + offset);
  Status status = driver_status((*table)->mem_map(where, size_bytes, 0, handle, 0),
                                fmt::format("mapping {} bytes on GPU {}", size_bytes, device_), kReachHint);
  if (!status.ok()) return status;
  const CUmemAccessDesc access = access_from(device_);
  status = driver_status((*table)->mem_set_access(where, size_bytes, &access, 1),
                         fmt::format("getting access to {} bytes on GPU {}", size_bytes, device_), kReachHint);
  if (!status.ok()) (*table)->mem_unmap(where, size_bytes);
  return status;
}

void PeerMapping::clear() {
  const DeviceGuard guard(device_);
  if (!guard.status().ok() || path_ != MemoryPath::kVmm) return;
  const RelaxedCapture relaxed;
  while (!chunks_.empty()) unmap_newest();
}

Status PeerMapping::stand_in(std::size_t bytes) {
  const DeviceGuard guard(device_);
  if (!guard.status().ok()) return guard.status();
  const RelaxedCapture relaxed;
  const Result<const Driver*> table = driver();
  const CUmemAllocationProp properties = shareable_memory(device_);
  CUmemGenericAllocationHandle handle = 0;
  Status status = driver_status((*table)->mem_create(&handle, granularity_, &properties, 0),
                                fmt::format("taking {} bytes of GPU {} for an absent rank", granularity_, device_));
  if (!status.ok()) return status;
  chunks_.reserve(bytes / granularity_ + 1);
  // The same memory everywhere: nothing of it is read.
  for (std::size_t offset = 0; offset < bytes && offset < size_bytes_ && status.ok(); offset += granularity_) {
    status = map_handle(handle, offset, granularity_);
    if (status.ok()) chunks_.push_back(Extent{offset, granularity_});
  }
  (*table)->mem_release(handle);
  return status;
}

Status PeerMapping::add_ipc(const ArenaChunk& chunk) {
  const Result<const Driver*> table = driver();
  void* data = nullptr;
  Status status = runtime_status(cudaIpcOpenMemHandle(&data, chunk.ipc, cudaIpcMemLazyEnablePeerAccess),
                                 fmt::format("opening {} bytes on GPU {}", chunk.size_bytes, device_), kReachHint);
  if (!status.ok()) return status;
  CUdeviceptr begin = 0;
  std::size_t size_bytes = 0;
  status = driver_status((*table)->mem_get_address_range(&begin, &size_bytes, device_address(data)),
                         "measuring a peer's arena");
  if (status.ok() && (begin != device_address(data) || size_bytes < chunk.size_bytes)) {
    status =
        Status(ErrorCode::kTransport, fmt::format("a peer's arena has {} bytes from its base, expected {}; run the "
                                                  "same build on every rank",
                                                  size_bytes, chunk.size_bytes));
  }
  if (!status.ok()) {
    cudaIpcCloseMemHandle(data);
    return status;
  }
  base_.store(static_cast<std::byte*>(data), std::memory_order_release);
  return {};
}

void PeerMapping::take_back(std::size_t offset) {
  if (path_ != MemoryPath::kVmm || chunks_.empty() || chunks_.back().offset != offset) return;
  const DeviceGuard guard(device_);
  if (!guard.status().ok()) return;
  const RelaxedCapture relaxed;
  unmap_newest();
}

void PeerMapping::unmap_newest() {
  const Extent newest = chunks_.back();
  chunks_.pop_back();
  if (const Result<const Driver*> table = driver(); table.ok()) {
    (*table)->mem_unmap(device_address(base() + newest.offset), newest.size_bytes);
  }
}

}  // namespace ferry::cuda
