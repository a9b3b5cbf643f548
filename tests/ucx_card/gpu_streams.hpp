#ifndef FERRY_TESTS_UCX_CARD_GPU_STREAMS_HPP
#define FERRY_TESTS_UCX_CARD_GPU_STREAMS_HPP

#include <cuda.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "ucx_card/gpu_copies.hpp"

namespace ferry::ucx_card {

/// The driver's functions, loaded when they are needed: tests of this library run without a driver, too.
struct Driver {
  decltype(&cuInit) init = nullptr;
  decltype(&cuDeviceGetCount) device_count = nullptr;
  decltype(&cuDevicePrimaryCtxRetain) retain_context = nullptr;
  decltype(&cuCtxPushCurrent) push_context = nullptr;
  decltype(&cuCtxPopCurrent) pop_context = nullptr;
  decltype(&cuPointerGetAttribute) pointer_attribute = nullptr;
  decltype(&cuMemGetAddressRange) address_range = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuMemHostAlloc) host_alloc = nullptr;
  decltype(&cuMemFreeHost) free_host = nullptr;
  decltype(&cuMemAlloc) allocate = nullptr;
  decltype(&cuMemFree) free = nullptr;
  decltype(&cuMemsetD8Async) fill = nullptr;
  decltype(&cuCtxGetStreamPriorityRange) priority_range = nullptr;
  decltype(&cuStreamCreateWithPriority) stream_create = nullptr;
  decltype(&cuStreamDestroy) stream_destroy = nullptr;
  decltype(&cuStreamQuery) query = nullptr;
  decltype(&cuStreamSynchronize) synchronize = nullptr;
  decltype(&cuMemcpyAsync) copy_async = nullptr;
  decltype(&cuStreamWriteValue64) write_value = nullptr;
  decltype(&cuLaunchKernel) launch = nullptr;
  decltype(&cuThreadExchangeStreamCaptureMode) capture_mode = nullptr;

  /// Null where there is no GPU.
  static const Driver* load();
};

/// For calls of a thread of the application: a current context, and no part of graphs that other threads capture. The
/// thread's own are back afterwards.
class DriverCall {
 public:
  DriverCall(const Driver& driver, CUcontext context) : driver_(driver) {
    driver_.capture_mode(&mode_);
    is_pushed_ = driver_.push_context(context) == CUDA_SUCCESS;
  }
  ~DriverCall() {
    CUcontext popped = nullptr;
    if (is_pushed_) driver_.pop_context(&popped);
    driver_.capture_mode(&mode_);
  }
  DriverCall(const DriverCall&) = delete;
  DriverCall& operator=(const DriverCall&) = delete;

 private:
  const Driver& driver_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
  bool is_pushed_ = false;
};

CUdeviceptr address_of(const std::byte* memory);

struct GpuCopy {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  std::size_t num_bytes = 0;
  GpuCopies::Done done;
  bool is_word = false;      ///< `word`, behind all copies begun before
  std::uint64_t word = 0;    ///< in place of memory at `from`
  std::uint64_t at_ns = 0;   ///< not before this time
  std::uint64_t behind = 0;  ///< number of the last large copy before it
};

/// A stream, whose copies follow each other.
class Lane {
 public:
  Lane() = default;
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  bool open(const Driver& driver);
  void close(const Driver& driver);

  /// False if the driver refuses.
  bool start(const Driver& driver, GpuCopy& copy);
  /// Reports the copies that have ended. True if there are more.
  bool look();

 private:
  CUstream stream_ = nullptr;
  std::uint64_t* word_ = nullptr;  // number of copies that have ended, written by the stream
  std::uint64_t num_started_ = 0;
  std::deque<GpuCopies::Done> begun_;
};

/// Streams of one GPU; those of several overlap their beginnings and ends.
class Streams {
 public:
  Streams(const Driver& driver, int device);
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;
  /// Ends after all copies.
  ~Streams();

  /// Reports the copy if the driver refuses it.
  void start(GpuCopy& copy);
  bool look();

 private:
  static constexpr std::size_t kNumLanes = 4;

  const Driver& driver_;
  CUcontext context_ = nullptr;
  bool good_ = false;
  std::size_t next_ = 0;
  std::array<Lane, kNumLanes> lanes_{};
};

}  // namespace ferry::ucx_card

#endif  // FERRY_TESTS_UCX_CARD_GPU_STREAMS_HPP
