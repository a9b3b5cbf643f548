#include "ucx_card/gpu_streams.hpp"

#include <dlfcn.h>

#include <atomic>
#include <type_traits>
#include <utility>

namespace ferry::ucx_card {

CUdeviceptr address_of(const std::byte* memory) {
  return static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(memory));
}

const Driver* Driver::load() {
  static const Driver* const loaded = []() -> const Driver* {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) return nullptr;
    static Driver driver;
    bool complete = true;
    const auto need = [&](auto* function, const char* name) {
      *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
      complete = complete && *function != nullptr;
    };
    need(&driver.init, "cuInit");
    need(&driver.device_count, "cuDeviceGetCount");
    need(&driver.retain_context, "cuDevicePrimaryCtxRetain");
    need(&driver.push_context, "cuCtxPushCurrent_v2");
    need(&driver.pop_context, "cuCtxPopCurrent_v2");
    need(&driver.pointer_attribute, "cuPointerGetAttribute");
    need(&driver.address_range, "cuMemGetAddressRange_v2");
    need(&driver.set_access, "cuMemSetAccess");
    need(&driver.host_alloc, "cuMemHostAlloc");
    need(&driver.free_host, "cuMemFreeHost");
    need(&driver.allocate, "cuMemAlloc_v2");
    need(&driver.free, "cuMemFree_v2");
    need(&driver.fill, "cuMemsetD8Async");
    need(&driver.priority_range, "cuCtxGetStreamPriorityRange");
    need(&driver.stream_create, "cuStreamCreateWithPriority");
    need(&driver.stream_destroy, "cuStreamDestroy_v2");
    need(&driver.query, "cuStreamQuery");
    need(&driver.synchronize, "cuStreamSynchronize");
    need(&driver.copy_async, "cuMemcpyAsync");
    need(&driver.write_value, "cuStreamWriteValue64_v2");
    need(&driver.launch, "cuLaunchKernel");
    need(&driver.capture_mode, "cuThreadExchangeStreamCaptureMode");
    int num_devices = 0;
    const bool works = complete && driver.init(0) == CUDA_SUCCESS &&
                       driver.device_count(&num_devices) == CUDA_SUCCESS && num_devices > 0;
    return works ? &driver : nullptr;
  }();
  return loaded;
}

bool Lane::open(const Driver& driver) {
  if (driver.stream_create(&stream_, CU_STREAM_NON_BLOCKING, 0) != CUDA_SUCCESS) return false;
  void* word = nullptr;
  if (driver.host_alloc(&word, sizeof *word_, CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE) != CUDA_SUCCESS) {
    return false;
  }
  word_ = static_cast<std::uint64_t*>(word);
  *word_ = 0;
  return true;
}

void Lane::close(const Driver& driver) {
  if (stream_ != nullptr) {
    driver.synchronize(stream_);
    if (word_ != nullptr) (void)look();
    driver.stream_destroy(stream_);
  }
  if (word_ != nullptr) driver.free_host(word_);
  for (const GpuCopies::Done& done : begun_) done(UCS_ERR_IO_ERROR);
}

bool Lane::start(const Driver& driver, GpuCopy& copy) {
  if (driver.copy_async(address_of(copy.to), address_of(copy.from), copy.num_bytes, stream_) != CUDA_SUCCESS ||
      driver.write_value(stream_, address_of(reinterpret_cast<std::byte*>(word_)), num_started_ + 1,
                         CU_STREAM_WRITE_VALUE_DEFAULT) != CUDA_SUCCESS) {
    return false;
  }
  ++num_started_;
  begun_.push_back(std::move(copy.done));
  return true;
}

bool Lane::look() {
  if (begun_.empty()) return false;
  const std::uint64_t num_ended = std::atomic_ref(*word_).load(std::memory_order_acquire);
  while (num_started_ - begun_.size() < num_ended) {
    const GpuCopies::Done done = std::move(begun_.front());
    begun_.pop_front();
    done(UCS_OK);
  }
  return !begun_.empty();
}

Streams::Streams(const Driver& driver, int device) : driver_(driver) {
  if (driver.retain_context(&context_, device) != CUDA_SUCCESS) return;
  const DriverCall call(driver, context_);
  good_ = true;
  for (Lane& lane : lanes_) good_ = good_ && lane.open(driver);
}

Streams::~Streams() {
  const DriverCall call(driver_, context_);
  for (Lane& lane : lanes_) lane.close(driver_);
}

void Streams::start(GpuCopy& copy) {
  const DriverCall call(driver_, context_);
  if (!good_ || !lanes_[next_++ % lanes_.size()].start(driver_, copy)) copy.done(UCS_ERR_IO_ERROR);
}

bool Streams::look() {
  bool busy = false;
  for (Lane& lane : lanes_) busy |= lane.look();
  return busy;
}

}  // namespace ferry::ucx_card
