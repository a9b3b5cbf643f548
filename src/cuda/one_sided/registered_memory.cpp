#include "cuda/one_sided/registered_memory.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <map>
#include <mutex>

#include "cuda/driver/cuda_call.hpp"

namespace ferry::cuda {
namespace {

struct Registered {
  std::mutex mutex;
  std::map<std::byte*, std::weak_ptr<std::byte>> blocks;  // guarded by mutex
};

/// Never destroyed: memory may be given back after static objects.
Registered& registered() {
  static auto* const all = new Registered;
  return *all;
}

void unregister(std::byte* data) {
  Registered& all = registered();
  const std::lock_guard lock(all.mutex);
  const auto found = all.blocks.find(data);
  if (found == all.blocks.end() || !found->second.expired()) return;  // another rank has it again
  all.blocks.erase(found);
  const RelaxedCapture relaxed;
  if (cudaHostUnregister(data) != cudaSuccess) cudaGetLastError();
}

}  // namespace

Result<std::shared_ptr<std::byte>> register_memory(std::byte* data, std::size_t num_bytes) {
  Registered& all = registered();
  std::unique_lock lock(all.mutex);
  std::weak_ptr<std::byte>& known = all.blocks[data];
  if (std::shared_ptr<std::byte> block = known.lock(); block != nullptr) return block;
  const RelaxedCapture relaxed;
  const cudaError_t error = cudaHostRegister(data, num_bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  // The block's last user is about to give it back.
  if (error != cudaSuccess && error != cudaErrorHostMemoryAlreadyRegistered) {
    all.blocks.erase(data);
    return runtime_status(error, fmt::format("OneSided::create: locking {} bytes of symmetric memory", num_bytes),
                          "use less of it, or raise the limit of locked memory (ulimit -l)");
  }
  if (error != cudaSuccess) cudaGetLastError();
  void* seen = nullptr;
  const cudaError_t mapped = cudaHostGetDevicePointer(&seen, data, 0);
  std::shared_ptr<std::byte> block(data, unregister);
  known = block;
  if (mapped == cudaSuccess && seen == data) return block;
  if (mapped != cudaSuccess) cudaGetLastError();
  lock.unlock();
  block.reset();
  return Status(ErrorCode::kUnsupported,
                "OneSided::create: this GPU does not reach locked host memory at the host's address, which symmetric "
                "memory of several nodes needs; use backend \"cpu\"");
}

}  // namespace ferry::cuda
