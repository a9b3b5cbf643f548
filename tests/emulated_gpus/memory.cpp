#include "emulated_gpus/memory.hpp"

#include <cuda_runtime_api.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "emulated_gpus/host.hpp"

namespace ferry::emulated {
namespace {

struct Ranges {
  std::mutex mutex;
  std::map<std::uintptr_t, Range> by_begin;  ///< guarded by `mutex`
};

/// Never destroyed: memory may be freed after the process's statics are destroyed.
Ranges& ranges() {
  static auto* const all = new Ranges;
  return *all;
}

constexpr std::size_t kPageBytes = 4096;

std::size_t in_pages(std::size_t num_bytes) { return (num_bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

cudaError_t take(void** data, std::size_t num_bytes, MemoryKind kind) {
  if (!may_call_uncaptured()) return cudaErrorStreamCaptureUnsupported;
  const std::size_t size_bytes = in_pages(num_bytes == 0 ? 1 : num_bytes);
  const int fd = make_file(size_bytes);
  *data = fd < 0 ? nullptr : map_file(fd, size_bytes);
  if (*data == nullptr) return cudaErrorMemoryAllocation;
  add_range({reinterpret_cast<std::uintptr_t>(*data), size_bytes, kind, current_device(), fd});
  return cudaSuccess;
}

/// Frees memory, as CUDA does, after all work of the GPU.
cudaError_t give(void* data) {
  if (data == nullptr) return cudaSuccess;
  if (!may_call_uncaptured()) return cudaErrorStreamCaptureUnsupported;
  finish_all_streams();
  const std::optional<Range> range = remove_range(data);
  if (!range) return cudaErrorInvalidValue;
  munmap(data, range->num_bytes);
  close(range->fd);
  return cudaSuccess;
}

/// Whether an address may be pageable host memory: the driver copies such memory before the call returns.
bool is_pageable(const void* address) { return !range_around(address); }

cudaError_t copy_on(Stream& stream, void* to, const void* from, std::size_t num_bytes) {
  if (is_pageable(from)) {
    const auto* const begin = static_cast<const std::byte*>(from);
    std::vector<std::byte> bytes(begin, begin + num_bytes);
    submit(stream,
           {Work::Kind::kCall, [to, bytes = std::move(bytes)] { std::memcpy(to, bytes.data(), bytes.size()); }, {}});
    return cudaSuccess;
  }
  submit(stream, {Work::Kind::kCall, [=] { std::memmove(to, from, num_bytes); }, {}});
  if (is_pageable(to) && !stream.capture) finish(stream);
  return cudaSuccess;
}

/// Contents of a cudaIpcMemHandle_t.
struct IpcHandle {
  int pid;
  int fd;
  std::size_t num_bytes;
};

}  // namespace

void add_range(const Range& range) {
  Ranges& all = ranges();
  const std::lock_guard lock(all.mutex);
  all.by_begin[range.begin] = range;
}

std::optional<Range> remove_range(const void* begin) {
  Ranges& all = ranges();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_begin.find(reinterpret_cast<std::uintptr_t>(begin));
  if (found == all.by_begin.end()) return std::nullopt;
  const Range range = found->second;
  all.by_begin.erase(found);
  return range;
}

std::optional<Range> range_around(const void* address) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  Ranges& all = ranges();
  const std::lock_guard lock(all.mutex);
  const auto after = all.by_begin.upper_bound(at);
  if (after == all.by_begin.begin()) return std::nullopt;
  const Range& range = std::prev(after)->second;
  if (at - range.begin >= range.num_bytes) return std::nullopt;
  return range;
}

int make_file(std::size_t num_bytes) {
  const int fd = memfd_create("emulated GPU memory", MFD_CLOEXEC);
  if (fd >= 0 && ftruncate(fd, static_cast<off_t>(num_bytes)) == 0) return fd;
  if (fd >= 0) close(fd);
  return -1;
}

void* map_file(int fd, std::size_t num_bytes) {
  void* const data = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return data == MAP_FAILED ? nullptr : data;
}

}  // namespace ferry::emulated

using namespace ferry::emulated;  // NOLINT(google-build-using-namespace)

// The names are CUDA's.
// NOLINTBEGIN(readability-identifier-naming)
extern "C" {

cudaError_t cudaMalloc(void** data, std::size_t num_bytes) {
  return result(take(data, num_bytes, MemoryKind::kDevice));
}
cudaError_t cudaFree(void* data) { return result(give(data)); }
cudaError_t cudaHostAlloc(void** data, std::size_t num_bytes, unsigned /*flags*/) {
  return result(take(data, num_bytes, MemoryKind::kPinned));
}
cudaError_t cudaFreeHost(void* data) { return result(give(data)); }
cudaError_t cudaHostRegister(void* data, std::size_t num_bytes, unsigned /*flags*/) {
  add_range({reinterpret_cast<std::uintptr_t>(data), num_bytes, MemoryKind::kPinned, current_device(), -1});
  return cudaSuccess;
}
/// Waits for all work of the GPU first, as CUDA does.
cudaError_t cudaHostUnregister(void* data) {
  finish_all_streams();
  return result(remove_range(data) ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned /*flags*/) {
  *device = host;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* num_bytes) {
  *free_bytes = *num_bytes = kMemoryBytes;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t num_bytes, cudaMemcpyKind /*kind*/,
                            cudaStream_t stream) {
  return result(copy_on(stream_of(stream), to, from, num_bytes));
}
cudaError_t cudaMemsetAsync(void* data, int value, std::size_t num_bytes, cudaStream_t stream) {
  submit(stream_of(stream), {Work::Kind::kCall, [=] { std::memset(data, value, num_bytes); }, {}});
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t num_bytes, cudaMemcpyKind /*kind*/) {
  if (!may_call_uncaptured()) return result(cudaErrorStreamCaptureUnsupported);
  finish_blocking_streams();
  std::memmove(to, from, num_bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* data, int value, std::size_t num_bytes) {
  if (!may_call_uncaptured()) return result(cudaErrorStreamCaptureUnsupported);
  finish_blocking_streams();
  std::memset(data, value, num_bytes);
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* data) {
  const std::optional<Range> range = range_around(data);
  if (!range || range->fd < 0) return result(cudaErrorInvalidValue);
  const IpcHandle made{getpid(), range->fd, range->num_bytes};
  *handle = {};
  std::memcpy(handle, &made, sizeof(made));
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** data, cudaIpcMemHandle_t handle, unsigned /*flags*/) {
  IpcHandle wanted{};
  std::memcpy(&wanted, &handle, sizeof(wanted));
  if (wanted.pid == getpid()) return result(cudaErrorDeviceUninitialized);  // same error as CUDA's
  const std::string path = "/proc/" + std::to_string(wanted.pid) + "/fd/" + std::to_string(wanted.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  *data = fd < 0 ? nullptr : map_file(fd, wanted.num_bytes);
  if (*data == nullptr) return result(cudaErrorMapBufferObjectFailed);
  add_range({reinterpret_cast<std::uintptr_t>(*data), wanted.num_bytes, MemoryKind::kDevice, current_device(), fd});
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void* data) { return result(give(data)); }

}  // extern "C"
// NOLINTEND(readability-identifier-naming)
