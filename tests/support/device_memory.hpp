#ifndef FERRY_TESTS_DEVICE_MEMORY_HPP
#define FERRY_TESTS_DEVICE_MEMORY_HPP

/// All uses of CUDA in tests; no other test file includes CUDA's headers. In a build without CUDA there are no devices
/// and every other function throws.
///
/// Ranks are often threads of one process on one GPU, each waiting inside kernels for the others. Therefore no function
/// here waits for a whole device, as cudaMalloc and cudaFree may (tools/device, with one process per rank, uses them):
/// memory comes from one block allocated before the first rank starts, and every thread copies on a stream of its own
/// that waits for no other.

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "ferry/types.hpp"

namespace ferry::test {

/// Number of GPUs of this machine, counted without CUDA: a process that has started CUDA cannot fork rank processes.
int num_device_files();
int num_devices();

/// Makes `device` the calling thread's device; call it before the thread works with others. The first call for a device
/// in a process allocates `pool_bytes` of its memory.
void enter_device(int device, std::size_t pool_bytes);
/// Allocates that memory on a device that the thread does not enter.
void reserve_device_memory(int device, std::size_t pool_bytes);
/// Device of the calling thread.
int current_device();
/// Only makes a device that the process has entered the calling thread's own.
void use_device(int device);

/// Device memory, as from cudaMalloc: only this process can reach it. It keeps the contents of its last owner.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  /// On the calling thread's device, or on another with reserved memory.
  explicit DeviceMemory(std::size_t num_bytes) : DeviceMemory(num_bytes, current_device()) {}
  DeviceMemory(std::size_t num_bytes, int device);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  /// Aligned to 512 bytes; null for zero bytes.
  std::byte* data() const { return data_; }

 private:
  int device_ = 0;
  std::size_t num_bytes_ = 0;
  std::byte* data_ = nullptr;
};

/// Stream of the calling thread on its device. Threads that end pass it on to later ones, so that few streams exist.
Stream thread_stream();

/// Copies on `thread_stream`, after all earlier work on it, and returns when done.
void copy_to_device(void* to, const void* from, std::size_t num_bytes);
void copy_from_device(void* to, const void* from, std::size_t num_bytes);
void fill_device(void* to, std::byte value, std::size_t num_bytes);
void synchronize(Stream stream);
/// Returns true if all work on the stream is done. Any thread of the process may call it.
bool is_idle(Stream stream);

/// Delays `stream` by this time without using the GPU.
void enqueue_delay(Stream stream, std::chrono::microseconds duration);

/// Name of the error that the calling thread's next cudaGetLastError would return; empty if there is none.
std::string pending_device_error();
/// Leaves a pending error, as a program that has not checked for its own mistake.
void leave_device_error();
void clear_device_error();

/// An additional stream of the calling thread's device.
class OwnedStream {
 public:
  OwnedStream();
  /// A stream of another device, which the thread does not enter.
  explicit OwnedStream(int device);
  /// A stream that synchronises with the default stream in both directions.
  static OwnedStream blocking();
  ~OwnedStream();
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  Stream get() const { return stream_; }

 private:
  explicit OwnedStream(Stream stream) : stream_(stream) {}
  Stream stream_;
};

/// Work recorded from a stream, to be run many times.
class CapturedGraph {
 public:
  CapturedGraph() = default;
  ~CapturedGraph();
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  /// Work put on `stream` between begin and end is recorded, not run. Other threads are not affected.
  void begin(Stream stream);
  /// Same as begin(), and the thread may make any CUDA call meanwhile.
  void begin_relaxed(Stream stream);
  void end();
  /// Invalidates the capture, as a program does that waits for a stream during its capture; end() then only ends it.
  void spoil();
  /// Makes the graph ready to run. All steps that may wait for the device happen here, not in `launch`.
  void prepare();
  void launch();

 private:
  Stream stream_;
  void* graph_ = nullptr;
  void* executable_ = nullptr;
  bool spoilt_ = false;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_DEVICE_MEMORY_HPP
