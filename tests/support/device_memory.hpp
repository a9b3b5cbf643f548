#ifndef FERRY_TESTS_DEVICE_MEMORY_HPP
#define FERRY_TESTS_DEVICE_MEMORY_HPP

/// All that tests use of CUDA itself; no other file of the tests includes its headers. In a build without CUDA there
/// are no devices and every other function throws.
///
/// Ranks are often threads of one process on one GPU, each waiting inside kernels for the others. So nothing here waits
/// for a whole device, as cudaMalloc and cudaFree may (and as tools/device does, with one process a rank): memory comes
/// from one block that is taken before the first rank starts to work, and every thread copies on a stream of its own
/// that waits for no other.

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "ferry/types.hpp"

namespace ferry::test {

/// GPUs that this machine shows, counted without CUDA: a process that has started CUDA cannot fork rank processes.
int num_device_files();
int num_devices();

/// Makes `device` the calling thread's device, before the thread works with others. The first call in a process for a
/// device takes `pool_bytes` of its memory.
void enter_device(int device, std::size_t pool_bytes);
/// Takes that memory of another device, which the thread does not enter.
void reserve_device_memory(int device, std::size_t pool_bytes);
/// The calling thread's device.
int current_device();
/// Makes a device that the process has entered the calling thread's own, and nothing else.
void use_device(int device);

/// Memory of a device, as from cudaMalloc: only this process can reach it. Holds what its last owner left in it.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  /// On the calling thread's device, or on another of which memory was reserved.
  explicit DeviceMemory(std::size_t num_bytes) : DeviceMemory(num_bytes, current_device()) {}
  DeviceMemory(std::size_t num_bytes, int device);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  /// Aligned to 512 bytes; null where no bytes were asked for.
  std::byte* data() const { return data_; }

 private:
  int device_ = 0;
  std::size_t num_bytes_ = 0;
  std::byte* data_ = nullptr;
};

/// The calling thread's stream on its device; threads that end leave it to later ones, so that few exist.
Stream thread_stream();

/// Copies on `thread_stream`, behind all work that is there, and returns when done.
void copy_to_device(void* to, const void* from, std::size_t num_bytes);
void copy_from_device(void* to, const void* from, std::size_t num_bytes);
void fill_device(void* to, std::byte value, std::size_t num_bytes);
void synchronize(Stream stream);
/// Whether everything on the stream is done. Any thread of the process.
bool is_idle(Stream stream);

/// Delays `stream` for this long without using the GPU.
void enqueue_delay(Stream stream, std::chrono::microseconds duration);

/// Name of the error that the calling thread's next cudaGetLastError would return; empty if there is none.
std::string pending_device_error();
/// Leaves one there, as a program does that made a mistake and has not looked yet.
void leave_device_error();
void clear_device_error();

/// Another stream of the calling thread's device.
class OwnedStream {
 public:
  OwnedStream();
  /// Of another device, which the thread does not enter.
  explicit OwnedStream(int device);
  /// One that waits for the default stream, which waits for it.
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

  /// What is put on `stream` between these two is recorded, not run. Other threads are not disturbed.
  void begin(Stream stream);
  /// The same, and the thread may call whatever it likes meanwhile.
  void begin_relaxed(Stream stream);
  void end();
  /// Makes what was recorded worthless, as a program does that waits for a stream while it is captured; the end only
  /// ends it then.
  void spoil();
  /// Makes it ready to run; everything that could wait for the device happens here, not in `launch`.
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
