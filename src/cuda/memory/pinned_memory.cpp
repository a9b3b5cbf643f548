#include "cuda/memory/pinned_memory.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

#include "cuda/driver/cuda_call.hpp"

namespace ferry::cuda {
namespace {

/// Room for a thousand routes of up to 4 KiB each whose counts are still unread; no more, because it is locked memory.
constexpr std::size_t kPinnedBytes = std::size_t{4} << 20;
constexpr int kAnyNode = -1;
constexpr std::string_view kCreate = "Group::create";

/// Blocks that no group uses. cudaFreeHost waits for every GPU of the process and holds the driver's lock meanwhile:
/// if a kernel waits for another rank of this process, that rank could no longer launch. Blocks therefore stay, as many
/// as the process ever had groups at a time.
struct IdleBlocks {
  struct Block {
    void* data = nullptr;
    std::size_t size_bytes = 0;
    int numa_node = -1;  // that it was asked for

    bool fits(std::size_t bytes, int node) const { return size_bytes == bytes && numa_node == node; }
  };
  std::mutex mutex;
  std::vector<Block> blocks;  // guarded by mutex
};

/// Never destroyed: groups may end after static objects.
IdleBlocks& idle_blocks() {
  static auto* const idle = new IdleBlocks;
  return *idle;
}

Result<void*> take_block(std::size_t bytes, int numa_node, std::string_view operation = kCreate) {
  {
    IdleBlocks& idle = idle_blocks();
    const std::lock_guard lock(idle.mutex);
    const auto found =
        std::ranges::find_if(idle.blocks, [&](const IdleBlocks::Block& block) { return block.fits(bytes, numa_node); });
    if (found != idle.blocks.end()) {
      void* const block = found->data;
      idle.blocks.erase(found);
      return block;
    }
  }
  void* block = nullptr;
  const cudaError_t error = cudaHostAlloc(&block, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
  if (error != cudaSuccess) {
    return runtime_status(error, fmt::format("{}: locking {} bytes of host memory", operation, bytes),
                          "free some memory or raise the limit of locked memory (ulimit -l)");
  }
  return block;
}

void give_back_block(void* block, std::size_t bytes, int numa_node) try {
  IdleBlocks& idle = idle_blocks();
  const std::lock_guard lock(idle.mutex);
  idle.blocks.push_back({block, bytes, numa_node});
} catch (const std::bad_alloc&) {
  // Called from destructors: memory that cannot be recorded stays allocated until the process ends.
}

/// Address of a block as kernels see it. A block for which this fails is not given back: a device reset may have left
/// it behind.
Result<std::byte*> view_of_kernels(void* host, std::string_view operation = kCreate) {
  void* device = nullptr;
  const cudaError_t mapped = cudaHostGetDevicePointer(&device, host, 0);
  if (mapped == cudaSuccess) return static_cast<std::byte*>(device);
  return runtime_status(mapped, fmt::format("{}: mapping host memory for the GPU", operation),
                        "this GPU cannot write host memory");
}

}  // namespace

Result<std::shared_ptr<PinnedMemory>> PinnedMemory::create() {
  const RelaxedCapture relaxed;
  const Result<void*> host = take_block(kPinnedBytes, kAnyNode);
  if (!host.ok()) return host.status();
  const Result<std::byte*> device = view_of_kernels(*host);
  if (!device.ok()) return device.status();
  return std::make_shared<PinnedMemory>(static_cast<std::byte*>(*host), *device);
}

Result<PinnedBlock> take_pinned(std::size_t bytes, int numa_node, std::string_view operation) {
  const RelaxedCapture relaxed;
  const Result<void*> host = take_block(bytes, numa_node, operation);
  if (!host.ok()) return host.status();
  const Result<std::byte*> device = view_of_kernels(*host, operation);
  if (!device.ok()) return device.status();
  std::memset(*host, 0, bytes);
  return PinnedBlock{
      std::shared_ptr<std::byte>(static_cast<std::byte*>(*host),
                                 [bytes, numa_node](std::byte* block) { give_back_block(block, bytes, numa_node); }),
      *device};
}

PinnedMemory::PinnedMemory(std::byte* host, std::byte* device) : host_(host), device_(device), heap_(kPinnedBytes) {
  pages_.reserve(kPinnedBytes / node::kPageBytes);
}

PinnedMemory::~PinnedMemory() { give_back_block(host_, kPinnedBytes, kAnyNode); }

Result<std::byte*> PinnedMemory::take(std::size_t bytes, bool zeroed) {
  const std::lock_guard lock(mutex_);
  const std::optional<std::size_t> offset = take_range(bytes);
  if (!offset) {
    return Status(ErrorCode::kCapacity,
                  "route: too many Routings wait for their counts; read the counts of older ones, or drop them");
  }
  if (zeroed) std::memset(host_ + *offset, 0, bytes);
  return host_ + *offset;
}

std::optional<std::size_t> PinnedMemory::take_range(std::size_t bytes) {
  if (bytes <= node::kPageBytes && !pages_.empty()) {
    const std::size_t page = pages_.back();
    pages_.pop_back();
    return page;
  }
  std::optional<std::size_t> offset = heap_.take(bytes);
  if (offset || pages_.empty()) return offset;
  for (const std::size_t page : pages_) heap_.give(page, node::kPageBytes);
  pages_.clear();
  return heap_.take(bytes);
}

void PinnedMemory::give(std::byte* host, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto offset = static_cast<std::size_t>(host - host_);
  if (bytes <= node::kPageBytes) {
    pages_.push_back(offset);  // there is room for all
  } else {
    heap_.give(offset, bytes);
  }
}

}  // namespace ferry::cuda
