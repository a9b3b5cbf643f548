#include "cuda/memory/device_arena.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>

#include "core/unique_fd.hpp"
#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/memory/deferred_free.hpp"

namespace ferry::cuda {
namespace {

/// The driver shares memory between processes in blocks of this size; an arena of whole blocks shares nothing else.
constexpr std::size_t kIpcGranularity = std::size_t{2} << 20;

/// The arena grows by at least this many bytes and this part of its size: growth takes 2 ms (2 H200 in a virtual
/// machine), in which the host waits for its peers.
constexpr std::size_t kMinGrowthBytes = std::size_t{32} << 20;
constexpr std::size_t kGrowthShare = 4;

constexpr std::string_view kMemoryHint = "free device memory, use smaller batches, or put fewer ranks on this GPU";

std::size_t round_up(std::size_t bytes, std::size_t granularity) {
  return (bytes + granularity - 1) / granularity * granularity;
}

/// Adds to an out-of-memory error how much the current device has left.
std::string describe_memory(int device) {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  if (cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess) {
    cudaGetLastError();
    return fmt::format("GPU {}", device);
  }
  return fmt::format("GPU {}, which has {} of its {} bytes free", device, free_bytes, total_bytes);
}

Result<UniqueFd> export_fd(const Driver& table, CUmemGenericAllocationHandle handle) {
  int fd = -1;
  const CUresult result =
      table.mem_export_to_shareable_handle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  if (Status status = driver_status(result, "allocate: exporting a chunk of the arena as a file descriptor",
                                    "raise the open-file limit (ulimit -n) if descriptors ran out");
      !status.ok()) {
    return status;
  }
  return UniqueFd(fd);
}

/// Tries to share memory: containers and sandboxes may refuse it although the device can.
bool shares_descriptors(const Driver& table, int device) {
  const Result<std::size_t> granularity = allocation_granularity(device);
  if (!granularity.ok()) return false;
  const CUmemAllocationProp properties = shareable_memory(device);
  CUmemGenericAllocationHandle handle = 0;
  const CUresult created = table.mem_create(&handle, *granularity, &properties, 0);
  // Running out of memory here does not rule this path out; a later allocation will report it.
  if (created != CUDA_SUCCESS) return created == CUDA_ERROR_OUT_OF_MEMORY;
  bool shared = false;
  if (Result<UniqueFd> fd = export_fd(table, handle); fd.ok()) {
    CUmemGenericAllocationHandle imported = 0;
    void* os_handle = reinterpret_cast<void*>(static_cast<std::uintptr_t>(fd->get()));
    shared = table.mem_import_from_shareable_handle(&imported, os_handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) ==
             CUDA_SUCCESS;
    if (shared) table.mem_release(imported);
  }
  table.mem_release(handle);
  return shared;
}

}  // namespace

std::string_view to_string(MemoryPath path) { return path == MemoryPath::kVmm ? "vmm" : "ipc"; }

namespace {

MemoryPath best_memory_path(int device) {
  const DeviceGuard guard(device);
  const RelaxedCapture relaxed;
  const Result<const Driver*> table = driver();
  CUdevice handle = 0;
  if (!guard.status().ok() || (*table)->device_get(&handle, device) != CUDA_SUCCESS) return MemoryPath::kIpc;
  for (const CUdevice_attribute attribute : {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                                             CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED}) {
    int supported = 0;
    if ((*table)->device_get_attribute(&supported, attribute, handle) != CUDA_SUCCESS || supported == 0) {
      return MemoryPath::kIpc;
    }
  }
  return shares_descriptors(**table, device) ? MemoryPath::kVmm : MemoryPath::kIpc;
}

}  // namespace

Result<MemoryPath> choose_memory_path(int device) {
  const char* variable = std::getenv(kMemoryPathVariable);
  const std::string_view wanted = variable == nullptr ? "" : variable;
  if (wanted == to_string(MemoryPath::kIpc)) return MemoryPath::kIpc;
  const MemoryPath best = best_memory_path(device);
  if (wanted.empty() || wanted == to_string(best)) return best;
  if (wanted == to_string(MemoryPath::kVmm)) {
    return Status(
        ErrorCode::kUnsupported,
        fmt::format("Group::create: {} is \"vmm\", but GPU {} or the sandbox around this process does not let "
                    "memory be shared as file descriptors; set it to \"ipc\", or not at all",
                    kMemoryPathVariable, device));
  }
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("Group::create: the environment variable {} is \"{}\", expected \"vmm\", \"ipc\" or none",
                            kMemoryPathVariable, wanted));
}

Result<std::shared_ptr<DeviceArena>> DeviceArena::create(int device, std::size_t size_bytes, MemoryPath path,
                                                         std::shared_ptr<OwnStream> stream, std::size_t head_bytes) {
  if (size_bytes > kMaxDeviceArenaBytes) {
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("arena: GroupOptions::arena_bytes is {}, expected at most {}", size_bytes, kMaxDeviceArenaBytes));
  }
  auto arena = std::make_shared<DeviceArena>(Private{}, device, path, std::move(stream));
  if (Status status = arena->reserve(size_bytes, head_bytes); !status.ok()) return status;
  return arena;
}

Status DeviceArena::reserve(std::size_t size_bytes, std::size_t head_bytes) {
  const DeviceGuard guard(device_);
  if (!guard.status().ok()) return guard.status();
  const RelaxedCapture relaxed;
  if (path_ == MemoryPath::kIpc) head_bytes = 0;
  Status status = path_ == MemoryPath::kVmm ? reserve_vmm(size_bytes, head_bytes) : reserve_ipc(size_bytes);
  if (status.ok() && head_bytes > 0) status = back_head(head_bytes);
  return status;
}

Status DeviceArena::reserve_vmm(std::size_t size_bytes, std::size_t head_bytes) {
  const Result<const Driver*> table = driver();
  const Result<std::size_t> granularity = allocation_granularity(device_);
  if (!granularity.ok()) return granularity.status();
  granularity_ = *granularity;
  // What stays free behind the head comes in addition.
  const std::size_t unused_bytes = round_up(head_bytes, granularity_) - head_bytes;
  const std::size_t usable_bytes = round_up(std::max<std::size_t>({size_bytes, head_bytes, 1}), granularity_);
  const std::size_t rounded = round_up(usable_bytes + unused_bytes, granularity_);
  CUdeviceptr reserved = 0;
  Status status = driver_status((*table)->mem_address_reserve(&reserved, rounded, granularity_, 0, 0),
                                fmt::format("arena: reserving {} bytes of addresses on GPU {}", rounded, device_),
                                "lower GroupOptions::arena_bytes or raise the address-space limit (ulimit -v)");
  if (!status.ok()) return status;
  base_ = reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(reserved));
  size_bytes_ = rounded;
  heap_ = node::PageHeap(usable_bytes + unused_bytes);
  return {};
}

Status DeviceArena::reserve_ipc(std::size_t size_bytes) {
  granularity_ = kIpcGranularity;
  const std::size_t rounded = round_up(std::clamp<std::size_t>(size_bytes, 1, kMaxIpcArenaBytes), kIpcGranularity);
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, rounded);
  if (error != cudaSuccess) {
    return runtime_status(error, fmt::format("arena: taking {} bytes of {}", rounded, describe_memory(device_)),
                          "lower GroupOptions::arena_bytes or free device memory");
  }
  base_ = static_cast<std::byte*>(data);
  size_bytes_ = rounded;
  heap_ = node::PageHeap(size_bytes_);
  chunks_.push_back(Chunk{0, rounded, 0});
  backed_bytes_.store(rounded, std::memory_order_release);
  return {};
}

DeviceArena::~DeviceArena() {
  if (base_ == nullptr) return;
  if (path_ == MemoryPath::kIpc) {
    free_without_groups(device_, base_, std::move(importers_));
    return;
  }
  const DeviceGuard guard(device_);
  // Without the device there is nothing left to free: the process is ending.
  if (!guard.status().ok()) return;
  const RelaxedCapture relaxed;
  for (const Chunk& chunk : chunks_) unmap_chunk(chunk);
  if (const Result<const Driver*> table = driver(); table.ok())
    (*table)->mem_address_free(device_address(base_), size_bytes_);
}

bool DeviceArena::contains(const void* data, std::size_t bytes) const {
  const auto* begin = static_cast<const std::byte*>(data);
  return begin >= base_ && begin <= base_ + size_bytes_ &&
         bytes <= static_cast<std::size_t>(base_ + size_bytes_ - begin);
}

Result<CUmemGenericAllocationHandle> DeviceArena::take_memory(std::size_t size_bytes) const {
  const Result<const Driver*> table = driver();
  const CUmemAllocationProp properties = shareable_memory(device_);
  CUmemGenericAllocationHandle handle = 0;
  if (const CUresult result = (*table)->mem_create(&handle, size_bytes, &properties, 0); result != CUDA_SUCCESS) {
    return driver_status(result, fmt::format("allocate: taking {} bytes of {}", size_bytes, describe_memory(device_)),
                         kMemoryHint);
  }
  return handle;
}

/// Maps a chunk's memory at its place; after an error it is not mapped.
Status DeviceArena::map_at(const Chunk& chunk) const {
  const Result<const Driver*> table = driver();
  const CUdeviceptr where = device_address(base_ + chunk.offset);
  Status status = driver_status((*table)->mem_map(where, chunk.size_bytes, 0, chunk.handle, 0),
                                fmt::format("allocate: mapping {} bytes of GPU {}", chunk.size_bytes, device_));
  if (!status.ok()) return status;
  status = open_access(chunk);
  if (!status.ok()) (*table)->mem_unmap(where, chunk.size_bytes);
  return status;
}

Result<DeviceArena::Chunk> DeviceArena::map_chunk(std::size_t offset, std::size_t size_bytes) const {
  const Result<CUmemGenericAllocationHandle> handle = take_memory(size_bytes);
  if (!handle.ok()) return handle.status();
  const Chunk chunk{offset, size_bytes, *handle};
  Status status = map_at(chunk);
  if (status.ok()) return chunk;
  (*driver())->mem_release(chunk.handle);
  return status;
}

Status DeviceArena::back_head(std::size_t bytes) {
  const std::lock_guard lock(growth_mutex_);
  const DeviceGuard guard(device_);
  if (!guard.status().ok()) return guard.status();
  const RelaxedCapture relaxed;
  chunks_.reserve(1);
  Result<Chunk> head = map_chunk(0, round_up(bytes, granularity_));
  if (!head.ok()) return head.status();
  chunks_.push_back(*head);
  backed_bytes_.store(head->size_bytes, std::memory_order_release);
  has_head_ = true;
  return {};
}

void DeviceArena::seal_head() {
  const std::lock_guard lock(heap_mutex_);
  // First fit: the rest of the head is all that lies before its end.
  if (has_head_ && allocated_bytes_ < chunks_.front().size_bytes) {
    static_cast<void>(heap_.take(chunks_.front().size_bytes - allocated_bytes_));
  }
}

/// Other memory for the head. If there is none beside the present one, gives that back first.
Result<CUmemGenericAllocationHandle> DeviceArena::replace_memory(Chunk& head) const {
  Result<CUmemGenericAllocationHandle> handle = take_memory(head.size_bytes);
  unmap_chunk(head);
  head.handle = 0;
  return handle.ok() ? handle : take_memory(head.size_bytes);
}

Status DeviceArena::renew_head() {
  if (!has_head_) {
    return Status(
        ErrorCode::kUnsupported,
        fmt::format("renew: memory of GPU {} is shared by way of \"{}\", at addresses that change; create a new "
                    "group",
                    device_, to_string(path_)));
  }
  const std::lock_guard lock(growth_mutex_);
  const DeviceGuard guard(device_);
  if (!guard.status().ok()) return guard.status();
  const RelaxedCapture relaxed;
  Chunk& head = chunks_.front();
  const Result<CUmemGenericAllocationHandle> handle = replace_memory(head);
  if (!handle.ok()) return handle.status();
  const Chunk renewed{0, head.size_bytes, *handle};
  if (Status status = map_at(renewed); !status.ok()) {
    (*driver())->mem_release(*handle);
    return status;
  }
  head = renewed;
  return zero(base_, head.size_bytes);
}

Status DeviceArena::open_access(const Chunk& chunk) const {
  const Result<const Driver*> table = driver();
  std::vector<CUmemAccessDesc> access{access_from(device_)};
  for (const int other : granted_) access.push_back(access_from(other));
  return driver_status(
      (*table)->mem_set_access(device_address(base_ + chunk.offset), chunk.size_bytes, access.data(), access.size()),
      fmt::format("allocate: giving {} GPUs of this process access to memory of GPU {}", access.size(), device_),
      "the GPUs need peer-to-peer access to each other (nvidia-smi topo -p2p rw)");
}

void DeviceArena::unmap_chunk(const Chunk& chunk) const {
  if (chunk.handle == 0) return;  // a head that could not be renewed
  const Result<const Driver*> table = driver();
  if (!table.ok()) return;
  (*table)->mem_unmap(device_address(base_ + chunk.offset), chunk.size_bytes);
  (*table)->mem_release(chunk.handle);
}

Status DeviceArena::announce_chunk(const Announce& announce, const Chunk& chunk) const {
  ArenaChunk announced{chunk.offset, chunk.size_bytes, -1, {}};
  if (path_ == MemoryPath::kIpc) {
    Status status = runtime_status(cudaIpcGetMemHandle(&announced.ipc, base_),
                                   fmt::format("arena: exporting {} bytes of GPU {}", chunk.size_bytes, device_),
                                   "this GPU or container cannot share memory between processes; run the ranks as "
                                   "threads of one process");
    return status.ok() ? announce(announced) : status;
  }
  const Result<const Driver*> table = driver();
  Result<UniqueFd> fd = export_fd(**table, chunk.handle);
  if (!fd.ok()) return fd.status();
  announced.fd = fd->get();
  return announce(announced);
}

Status DeviceArena::set_announce(Announce announce) {
  const std::lock_guard lock(growth_mutex_);
  announce_ = nullptr;
  if (!announce) return {};
  const DeviceGuard guard(device_);
  if (!guard.status().ok()) return guard.status();
  const RelaxedCapture relaxed;
  for (const Chunk& chunk : chunks_) {
    if (Status status = announce_chunk(announce, chunk); !status.ok()) return status;
  }
  announce_ = std::move(announce);
  return {};
}

Status DeviceArena::grant_access(int device) {
  const std::lock_guard lock(growth_mutex_);
  if (device == device_ || std::find(granted_.begin(), granted_.end(), device) != granted_.end()) return {};
  if (path_ == MemoryPath::kIpc) {
    const DeviceGuard guard(device);
    if (!guard.status().ok()) return guard.status();
    const RelaxedCapture relaxed;
    const cudaError_t error = cudaDeviceEnablePeerAccess(device_, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      cudaGetLastError();
    } else if (error != cudaSuccess) {
      return runtime_status(error, fmt::format("arena: giving GPU {} access to memory of GPU {}", device, device_),
                            "the GPUs need peer-to-peer access to each other (nvidia-smi topo -p2p rw)");
    }
    granted_.push_back(device);
    return {};
  }
  const DeviceGuard guard(device_);
  if (!guard.status().ok()) return guard.status();
  const RelaxedCapture relaxed;
  granted_.push_back(device);
  for (const Chunk& chunk : chunks_) {
    if (Status status = open_access(chunk); !status.ok()) {
      granted_.pop_back();
      return status;
    }
  }
  return {};
}

Status DeviceArena::back(std::size_t end) {
  if (end <= backed_bytes()) return {};
  const std::lock_guard lock(growth_mutex_);
  const std::size_t backed = backed_bytes();
  if (end <= backed) return {};
  const DeviceGuard guard(device_);
  if (!guard.status().ok()) return guard.status();
  const RelaxedCapture relaxed;
  chunks_.reserve(chunks_.size() + 1);
  const std::size_t needed_bytes = round_up(end - backed, granularity_);
  const std::size_t step_bytes = round_up(std::max(kMinGrowthBytes, backed / kGrowthShare), granularity_);
  const std::size_t ahead_bytes = std::max(needed_bytes, std::min(step_bytes, size_bytes_ - backed));
  Result<Chunk> chunk = map_chunk(backed, ahead_bytes);
  if (!chunk.ok() && ahead_bytes > needed_bytes) chunk = map_chunk(backed, needed_bytes);
  if (!chunk.ok()) return chunk.status();
  if (announce_) {
    if (Status status = announce_chunk(announce_, *chunk); !status.ok()) {
      unmap_chunk(*chunk);
      return status;
    }
  }
  chunks_.push_back(*chunk);
  backed_bytes_.store(backed + chunk->size_bytes, std::memory_order_release);
  return {};
}

Result<std::byte*> DeviceArena::take(std::size_t bytes) {
  if (bytes == 0) return base_;
  std::size_t offset = 0;
  {
    const std::lock_guard lock(heap_mutex_);
    const std::optional<std::size_t> taken = heap_.take(bytes);
    if (!taken) {
      return Status(
          ErrorCode::kCapacity,
          fmt::format(
              "allocate: {} bytes do not fit on GPU {}: {} of the arena's {} are in use and the largest free "
              "range is {}; raise GroupOptions::arena_bytes{}",
              bytes, device_, allocated_bytes_, size_bytes_, heap_.largest_free_bytes(),
              path_ == MemoryPath::kIpc
                  ? fmt::format(" (at most {} where memory cannot be shared as file descriptors)", kMaxIpcArenaBytes)
                  : ""));
    }
    offset = *taken;
    allocated_bytes_ += node::round_up_to_page(bytes);
  }
  std::byte* const data = base_ + offset;
  if (Status status = back(offset + node::round_up_to_page(bytes)); !status.ok()) {
    give(data, bytes);
    return status;
  }
  return data;
}

void DeviceArena::give(std::byte* data, std::size_t bytes) {
  if (bytes == 0) return;
  const std::lock_guard lock(heap_mutex_);
  heap_.give(static_cast<std::size_t>(data - base_), bytes);
  allocated_bytes_ -= node::round_up_to_page(bytes);
}

Status DeviceArena::zero(std::byte* data, std::size_t bytes) const {
  const DeviceGuard guard(device_);
  if (!guard.status().ok()) return guard.status();
  const RelaxedCapture relaxed;
  // Waits for this stream alone: other ranks may be waiting for each other in kernels on the same GPU. The wait ends
  // when the kernels before it end; to give up earlier would hand out memory that is about to be overwritten.
  cudaError_t error = cudaMemsetAsync(data, 0, bytes, stream_->get());
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream_->get());
  return runtime_status(error, fmt::format("allocate: zeroing {} bytes of GPU {}", bytes, device_),
                        "an earlier kernel of this process may have failed; see compute-sanitizer");
}

std::size_t DeviceArena::largest_free_bytes() const {
  const std::lock_guard lock(heap_mutex_);
  return heap_.largest_free_bytes();
}

std::size_t DeviceArena::allocated_bytes() const {
  const std::lock_guard lock(heap_mutex_);
  return allocated_bytes_;
}

}  // namespace ferry::cuda
