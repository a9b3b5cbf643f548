#include "cuda/pinned_memory.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <cstring>

#include "cuda/cuda_status.hpp"

namespace ferry::cuda {
namespace {

/// A thousand routes of up to 4 KiB each, whose counts nobody has read yet; locked in memory, so no more than that.
constexpr std::size_t kPinnedBytes = std::size_t{4} << 20;

}  // namespace

Result<std::shared_ptr<PinnedMemory>> PinnedMemory::create() {
  const RelaxedCapture relaxed;
  void* host = nullptr;
  const cudaError_t error = cudaHostAlloc(&host, kPinnedBytes, cudaHostAllocPortable | cudaHostAllocMapped);
  if (error != cudaSuccess) {
    return cuda_status(error, fmt::format("Group::create: locking {} bytes of host memory", kPinnedBytes),
                       "free some memory or raise the limit of locked memory (ulimit -l)");
  }
  void* device = nullptr;
  if (const cudaError_t mapped = cudaHostGetDevicePointer(&device, host, 0); mapped != cudaSuccess) {
    cudaFreeHost(host);
    return cuda_status(mapped, "Group::create: mapping host memory for the GPU", "this GPU cannot write host memory");
  }
  return std::make_shared<PinnedMemory>(static_cast<std::byte*>(host), static_cast<std::byte*>(device));
}

PinnedMemory::PinnedMemory(std::byte* host, std::byte* device) : host_(host), device_(device), heap_(kPinnedBytes) {}

PinnedMemory::~PinnedMemory() {
  const RelaxedCapture relaxed;
  cudaFreeHost(host_);
}

Result<std::byte*> PinnedMemory::take(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::optional<std::size_t> offset = heap_.take(bytes);
  if (!offset) {
    return Status(ErrorCode::kCapacity,
                  "route: too many Routings wait for their counts; read the counts of older ones, or drop them");
  }
  std::memset(host_ + *offset, 0, bytes);
  return host_ + *offset;
}

void PinnedMemory::give(std::byte* host, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  heap_.give(static_cast<std::size_t>(host - host_), bytes);
}

}  // namespace ferry::cuda
