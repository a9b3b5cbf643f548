#ifndef FERRY_TESTS_UCX_CARD_GPU_STREAMS_HPP
#define FERRY_TESTS_UCX_CARD_GPU_STREAMS_HPP

#include <cuda.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "ucx_card/gpu_copies.hpp"

namespace ferry::ucx_card {

/// The driver's functions, loaded when they are needed: tests of this library run without a driver, too.
struct Driver {
  decltype(&cuInit) init = nullptr;
  decltype(&cuDeviceGetCount) device_count = nullptr;
  decltype(&cuDevicePrimaryCtxRetain) retain_context = nullptr;
  decltype(&cuCtxSetCurrent) set_context = nullptr;
  decltype(&cuPointerGetAttribute) pointer_attribute = nullptr;
  decltype(&cuMemGetAddressRange) address_range = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuMemHostAlloc) host_alloc = nullptr;
  decltype(&cuMemFreeHost) free_host = nullptr;
  decltype(&cuCtxGetStreamPriorityRange) priority_range = nullptr;
  decltype(&cuStreamCreateWithPriority) stream_create = nullptr;
  decltype(&cuStreamDestroy) stream_destroy = nullptr;
  decltype(&cuMemcpyAsync) copy_async = nullptr;
  decltype(&cuStreamWriteValue64) write_value = nullptr;
  decltype(&cuEventCreate) event_create = nullptr;
  decltype(&cuEventDestroy) event_destroy = nullptr;
  decltype(&cuEventRecord) event_record = nullptr;
  decltype(&cuEventQuery) event_query = nullptr;
  decltype(&cuThreadExchangeStreamCaptureMode) capture_mode = nullptr;
#if CUDA_VERSION >= 13000
  decltype(&cuMemcpyBatchAsync) copy_batch = nullptr;  ///< null in drivers before CUDA 13
#endif

  /// Null where there is no GPU.
  static const Driver* load();
};

CUdeviceptr address_of(const std::byte* memory);

struct GpuCopy {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  std::size_t num_bytes = 0;
  GpuCopies::Done done;
};

/// A stream, whose copies follow each other.
class Lane {
 public:
  Lane() = default;
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  bool open(const Driver& driver, int priority);
  /// Ends after all copies.
  void close(const Driver& driver);

  /// Copies all, in any order among them. False if the driver refuses.
  bool start(const Driver& driver, std::span<GpuCopy> copies, bool in_one_call, bool by_event);
  /// Reports the copies that have ended. True if there were any, or are more.
  bool look(const Driver& driver);

 private:
  struct Begun {
    CUevent event = nullptr;   // null: the word tells
    std::uint64_t number = 0;  // value of the word once they have ended
    std::vector<GpuCopies::Done> done;
  };

  /// UCS_INPROGRESS: they have not ended.
  ucs_status_t status_of(const Driver& driver, const Begun& begun) const;
  bool copy(const Driver& driver, std::span<GpuCopy> copies, bool in_one_call);
  bool mark(const Driver& driver, bool by_event, Begun* begun);

  CUstream stream_ = nullptr;
  std::uint64_t* word_ = nullptr;  // written by the stream
  std::uint64_t num_marks_ = 0;
  std::deque<Begun> begun_;
  std::vector<CUevent> spare_events_;
  // Arguments of a call.
  std::vector<CUdeviceptr> to_;
  std::vector<CUdeviceptr> from_;
  std::vector<std::size_t> num_bytes_;
};

/// Streams of one GPU; those of several overlap their beginnings and ends.
class Streams {
 public:
  Streams(const Driver& driver, const GpuCopyOptions& options, int device);
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;
  ~Streams();

  /// Reports those that the driver refuses.
  void start_small(std::span<GpuCopy> copies);
  void start(GpuCopy& copy);
  bool look();

 private:
  static constexpr std::size_t kNumLanes = 4;
  static constexpr std::size_t kNumSmallLanes = 2;

  void start(Lane& lane, std::span<GpuCopy> copies, bool in_one_call);

  const Driver& driver_;
  const GpuCopyOptions options_;
  CUcontext context_ = nullptr;
  bool good_ = false;
  std::size_t next_ = 0;
  std::size_t next_small_ = 0;
  std::array<Lane, kNumLanes> lanes_{};
  std::array<Lane, kNumSmallLanes> small_lanes_{};
};

}  // namespace ferry::ucx_card

#endif  // FERRY_TESTS_UCX_CARD_GPU_STREAMS_HPP
