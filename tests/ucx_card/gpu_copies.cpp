#include "ucx_card/gpu_copies.hpp"

#include <cuda.h>
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "node/pause_core.hpp"
#include "ucx_card/card_mutex.hpp"

namespace ferry::ucx_card {
namespace {

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
  decltype(&cuStreamCreate) stream_create = nullptr;
  decltype(&cuStreamDestroy) stream_destroy = nullptr;
  decltype(&cuMemcpyAsync) copy_async = nullptr;
  decltype(&cuStreamWriteValue64) write_value = nullptr;
  decltype(&cuThreadExchangeStreamCaptureMode) capture_mode = nullptr;

  static const Driver* load();
};

const Driver* Driver::load() {
  static const Driver* const loaded = []() -> const Driver* {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) return nullptr;
    static Driver driver;
    bool complete = true;
    const auto find = [&](auto* function, const char* name) {
      *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
      complete = complete && *function != nullptr;
    };
    find(&driver.init, "cuInit");
    find(&driver.device_count, "cuDeviceGetCount");
    find(&driver.retain_context, "cuDevicePrimaryCtxRetain");
    find(&driver.set_context, "cuCtxSetCurrent");
    find(&driver.pointer_attribute, "cuPointerGetAttribute");
    find(&driver.address_range, "cuMemGetAddressRange_v2");
    find(&driver.set_access, "cuMemSetAccess");
    find(&driver.host_alloc, "cuMemHostAlloc");
    find(&driver.free_host, "cuMemFreeHost");
    find(&driver.stream_create, "cuStreamCreate");
    find(&driver.stream_destroy, "cuStreamDestroy_v2");
    find(&driver.copy_async, "cuMemcpyAsync");
    find(&driver.write_value, "cuStreamWriteValue64_v2");
    find(&driver.capture_mode, "cuThreadExchangeStreamCaptureMode");
    int num_devices = 0;
    const bool works = complete && driver.init(0) == CUDA_SUCCESS &&
                       driver.device_count(&num_devices) == CUDA_SUCCESS && num_devices > 0;
    return works ? &driver : nullptr;
  }();
  return loaded;
}

CUdeviceptr address_of(const std::byte* memory) {
  return static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(memory));
}

/// GPU of memory; absent for memory of the host.
int device_of(const Driver& driver, const std::byte* memory) {
  unsigned type = 0;
  int device = -1;
  if (driver.pointer_attribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address_of(memory)) != CUDA_SUCCESS ||
      type != CU_MEMORYTYPE_DEVICE) {
    return -1;
  }
  driver.pointer_attribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address_of(memory));
  return device;
}

/// Streams of one GPU. Copies of one follow each other; those of several overlap their beginnings and ends.
class Streams {
 public:
  Streams(const Driver& driver, int device) : driver_(driver) {
    good_ = driver.retain_context(&context_, device) == CUDA_SUCCESS && driver.set_context(context_) == CUDA_SUCCESS;
    for (Lane& lane : lanes_) {
      good_ = good_ && driver.stream_create(&lane.stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS &&
              driver.host_alloc(reinterpret_cast<void**>(&lane.ended), sizeof *lane.ended,
                                CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE) == CUDA_SUCCESS;
      if (good_) *lane.ended = 0;
    }
  }
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;
  ~Streams() {
    driver_.set_context(context_);
    for (Lane& lane : lanes_) {
      if (lane.stream != nullptr) driver_.stream_destroy(lane.stream);
      if (lane.ended != nullptr) driver_.free_host(lane.ended);
    }
  }

  /// False if the driver refuses the copy.
  bool start(std::byte* to, const std::byte* from, std::size_t num_bytes, GpuCopies::Done& done) {
    if (!good_ || driver_.set_context(context_) != CUDA_SUCCESS) return false;
    Lane& lane = lanes_[next_++ % lanes_.size()];
    if (driver_.copy_async(address_of(to), address_of(from), num_bytes, lane.stream) != CUDA_SUCCESS) return false;
    if (driver_.write_value(lane.stream, address_of(reinterpret_cast<std::byte*>(lane.ended)), ++lane.started,
                            CU_STREAM_WRITE_VALUE_DEFAULT) != CUDA_SUCCESS) {
      return false;
    }
    lane.copies.emplace_back(std::move(done));
    return true;
  }

  /// Reports the copies that have ended. True if there were any, or are more.
  bool look() {
    bool busy = false;
    for (Lane& lane : lanes_) {
      busy |= !lane.copies.empty();
      if (lane.copies.empty()) continue;
      const std::uint64_t ended = std::atomic_ref(*lane.ended).load(std::memory_order_acquire);
      for (; lane.reported < ended; ++lane.reported) {
        const GpuCopies::Done done = std::move(lane.copies.front());
        lane.copies.pop_front();
        done(UCS_OK);
      }
    }
    return busy;
  }

 private:
  static constexpr std::size_t kNumLanes = 4;
  struct Lane {
    CUstream stream = nullptr;
    std::uint64_t* ended = nullptr;  // written by the stream
    std::uint64_t started = 0;
    std::uint64_t reported = 0;
    std::deque<GpuCopies::Done> copies{};
  };

  const Driver& driver_;
  CUcontext context_ = nullptr;
  bool good_ = false;
  std::size_t next_ = 0;
  std::array<Lane, kNumLanes> lanes_{};
};

class DriverCopies : public GpuCopies {
 public:
  DriverCopies(const Driver& driver, bool spins) : driver_(driver), spins_(spins) {
    mutex_.set_spins(spins);
    thread_ = std::thread([this] { run(); });
  }
  ~DriverCopies() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

  ucs_status_t share(std::byte* address) override {
    CUdeviceptr begin = 0;
    std::size_t num_bytes = 0;
    int num_devices = 0;
    if (driver_.address_range(&begin, &num_bytes, address_of(address)) != CUDA_SUCCESS ||
        driver_.device_count(&num_devices) != CUDA_SUCCESS) {
      return UCS_ERR_IO_ERROR;
    }
    std::vector<CUmemAccessDesc> access;
    for (int device = 0; device < num_devices; ++device) {
      CUmemAccessDesc one{};
      one.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
      one.location.id = device;
      one.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
      access.push_back(one);
    }
    return driver_.set_access(begin, num_bytes, access.data(), access.size()) == CUDA_SUCCESS ? UCS_OK
                                                                                              : UCS_ERR_IO_ERROR;
  }

  void start(std::byte* to, const std::byte* from, std::size_t num_bytes, Done done) override {
    {
      const std::lock_guard lock(mutex_);
      new_.push_back({to, from, num_bytes, std::move(done)});
      num_new_.store(new_.size(), std::memory_order_release);
    }
    if (!spins_) changed_.notify_one();
  }

  ucs_status_t copy(std::byte* to, const std::byte* from, std::size_t num_bytes) override {
    const std::lock_guard lock(own_mutex_);
    ucs_status_t result = UCS_INPROGRESS;
    Copy copy{to, from, num_bytes, [&result](ucs_status_t status) { result = status; }};
    begin(copy, &own_streams_);
    while (result == UCS_INPROGRESS) look(&own_streams_);
    return result;
  }

 private:
  struct Copy {
    std::byte* to = nullptr;
    const std::byte* from = nullptr;
    std::size_t num_bytes = 0;
    Done done;
  };

  void run() {
    // Copies are no part of graphs that other threads capture.
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    driver_.capture_mode(&mode);
    bool busy = false;
    while (take(busy)) {
      for (Copy& copy : taken_) begin(copy, &streams_);
      taken_.clear();
      busy = look(&streams_);
    }
    streams_.clear();
  }

  /// Takes what is new, and sleeps where there is nothing to do. False: end.
  bool take(bool busy) {
    if ((busy || spins_) && num_new_.load(std::memory_order_acquire) == 0 &&
        !stopping_.load(std::memory_order_relaxed)) {
      if (!busy) node::pause_core();
      return true;
    }
    std::unique_lock lock(mutex_);
    if (!busy && !spins_) changed_.wait(lock, [this] { return stopping_ || !new_.empty(); });
    taken_.swap(new_);
    num_new_.store(0, std::memory_order_relaxed);
    return busy || !stopping_ || !taken_.empty();
  }

  void begin(Copy& copy, std::map<int, Streams>* all) {
    // The GPU that reads has the copy engine that is fastest between two; memory of the host has none.
    int device = device_of(driver_, copy.from);
    if (device < 0) device = device_of(driver_, copy.to);
    Streams& streams = all->try_emplace(device, driver_, device < 0 ? 0 : device).first->second;
    if (!streams.start(copy.to, copy.from, copy.num_bytes, copy.done)) copy.done(UCS_ERR_IO_ERROR);
  }

  static bool look(std::map<int, Streams>* all) {
    bool busy = false;
    for (auto& [device, streams] : *all) busy |= streams.look();
    return busy;
  }

  const Driver& driver_;
  const bool spins_;
  CardMutex mutex_;
  std::condition_variable_any changed_;
  std::vector<Copy> new_;  // guarded by mutex_
  std::atomic<std::size_t> num_new_{0};
  std::atomic<bool> stopping_{false};
  // Used by the thread only.
  std::vector<Copy> taken_;
  std::map<int, Streams> streams_;
  // For copies that their caller waits for.
  std::mutex own_mutex_;
  std::map<int, Streams> own_streams_;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<GpuCopies> GpuCopies::create(bool spins) {
  const Driver* const driver = Driver::load();
  return driver != nullptr ? std::make_unique<DriverCopies>(*driver, spins) : nullptr;
}

}  // namespace ferry::ucx_card
