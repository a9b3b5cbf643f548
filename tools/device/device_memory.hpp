#ifndef FERRY_TOOLS_DEVICE_DEVICE_MEMORY_HPP
#define FERRY_TOOLS_DEVICE_DEVICE_MEMORY_HPP

/// GPU memory, streams and events without CUDA's types, so that only the files behind this header need CUDA. A build
/// without the CUDA backend has the same functions: they find no device and refuse with kUnsupported.
/// Calls act on the device that this thread selected. The first call starts CUDA, which does not survive a fork: a
/// process that forks ranks must not make any of them before.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry::tools {

/// True if this command was built with the CUDA backend. Does not start CUDA.
bool built_with_cuda();

/// Number of GPUs that this process can use.
/// @errors kUnsupported: no CUDA backend in this build, no driver, or no GPU (the message names the cause)
Result<int> count_devices();

/// Makes `device` this thread's current one.
Status select_device(int device);

struct FreeDeviceMemory {
  void operator()(std::byte* data) const;
};
struct DestroyDeviceStream {
  void operator()(void* handle) const;
};
struct DestroyDeviceEvent {
  void operator()(void* handle) const;
};
struct CloseIpcMemory {
  void operator()(std::byte* data) const;
};

/// Memory of the current device (cudaMalloc), freed with its owner.
using DeviceMemory = std::unique_ptr<std::byte, FreeDeviceMemory>;
/// @errors kSystem: the device is out of memory; kCuda
Result<DeviceMemory> allocate_device_memory(std::size_t num_bytes);

/// Copies between any two of host and device memory, after all earlier work on `stream`; returns when done.
Status copy_device_bytes(void* to, const void* from, std::size_t num_bytes, Stream stream);
/// Only puts the fill on the stream.
Status fill_device_bytes(void* to, int value, std::size_t num_bytes, Stream stream);

/// A stream that does not wait for the default stream.
class DeviceStream {
 public:
  static Result<DeviceStream> create();
  Stream get() const { return {handle_.get()}; }
  /// Blocks until all work on the stream is done.
  Status wait() const;

 private:
  std::unique_ptr<void, DestroyDeviceStream> handle_;
};

/// A point in a stream, with the time when the device reached it.
class DeviceEvent {
 public:
  static Result<DeviceEvent> create();
  Status record(Stream stream) const;
  /// Time from `start` to this event; blocks until both are reached.
  Result<std::int64_t> elapsed_ns_since(const DeviceEvent& start) const;

 private:
  std::unique_ptr<void, DestroyDeviceEvent> handle_;
};

/// Keeps the stream busy for this long, with one thread that polls the device's clock.
Status delay_stream(Stream stream, std::int64_t duration_ns);

/// Size of a cudaIpcMemHandle_t (CUDA runtime API, CUDA_IPC_HANDLE_SIZE).
inline constexpr std::size_t kIpcHandleBytes = 64;
using IpcHandle = std::array<std::byte, kIpcHandleBytes>;

/// Allows other processes of this machine to map memory of allocate_device_memory.
Result<IpcHandle> export_device_memory(const DeviceMemory& memory);
/// Memory of another process, accessible from the current device. The other process must not free it before this.
using IpcMemory = std::unique_ptr<std::byte, CloseIpcMemory>;
Result<IpcMemory> open_device_memory(const IpcHandle& handle);
/// Makes memory of allocate_device_memory on another GPU of this process accessible from the current device.
Status reach_device(int ordinal);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEVICE_DEVICE_MEMORY_HPP
