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
    const auto find = [&](auto* function, const char* name) {
      *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
      return *function != nullptr;
    };
    bool complete = true;
    const auto need = [&](auto* function, const char* name) { complete = find(function, name) && complete; };
    need(&driver.init, "cuInit");
    need(&driver.device_count, "cuDeviceGetCount");
    need(&driver.retain_context, "cuDevicePrimaryCtxRetain");
    need(&driver.set_context, "cuCtxSetCurrent");
    need(&driver.pointer_attribute, "cuPointerGetAttribute");
    need(&driver.address_range, "cuMemGetAddressRange_v2");
    need(&driver.set_access, "cuMemSetAccess");
    need(&driver.host_alloc, "cuMemHostAlloc");
    need(&driver.free_host, "cuMemFreeHost");
    need(&driver.priority_range, "cuCtxGetStreamPriorityRange");
    need(&driver.stream_create, "cuStreamCreateWithPriority");
    need(&driver.stream_destroy, "cuStreamDestroy_v2");
    need(&driver.copy_async, "cuMemcpyAsync");
    need(&driver.write_value, "cuStreamWriteValue64_v2");
    need(&driver.event_create, "cuEventCreate");
    need(&driver.event_destroy, "cuEventDestroy_v2");
    need(&driver.event_record, "cuEventRecord");
    need(&driver.event_query, "cuEventQuery");
    need(&driver.capture_mode, "cuThreadExchangeStreamCaptureMode");
#if CUDA_VERSION >= 13000
    (void)find(&driver.copy_batch, "cuMemcpyBatchAsync_v2");
#endif
    int num_devices = 0;
    const bool works = complete && driver.init(0) == CUDA_SUCCESS &&
                       driver.device_count(&num_devices) == CUDA_SUCCESS && num_devices > 0;
    return works ? &driver : nullptr;
  }();
  return loaded;
}

bool Lane::open(const Driver& driver, int priority) {
  if (driver.stream_create(&stream_, CU_STREAM_NON_BLOCKING, priority) != CUDA_SUCCESS) return false;
  void* word = nullptr;
  if (driver.host_alloc(&word, sizeof *word_, CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE) != CUDA_SUCCESS) {
    return false;
  }
  word_ = static_cast<std::uint64_t*>(word);
  *word_ = 0;
  return true;
}

void Lane::close(const Driver& driver) {
  if (stream_ != nullptr) driver.stream_destroy(stream_);
  for (const CUevent event : spare_events_) driver.event_destroy(event);
  if (word_ != nullptr) driver.free_host(word_);
}

bool Lane::start(const Driver& driver, std::span<GpuCopy> copies, bool in_one_call, bool by_event) {
  Begun begun;
  if (!copy(driver, copies, in_one_call) || !mark(driver, by_event, &begun)) return false;
  for (GpuCopy& one : copies) begun.done.push_back(std::move(one.done));
  begun_.push_back(std::move(begun));
  return true;
}

bool Lane::copy(const Driver& driver, std::span<GpuCopy> copies, [[maybe_unused]] bool in_one_call) {
#if CUDA_VERSION >= 13000
  if (in_one_call && driver.copy_batch != nullptr) {
    to_.clear();
    from_.clear();
    num_bytes_.clear();
    for (const GpuCopy& one : copies) {
      to_.push_back(address_of(one.to));
      from_.push_back(address_of(one.from));
      num_bytes_.push_back(one.num_bytes);
    }
    // By a copy engine: without the flag the driver may copy inside a GPU by a kernel.
    CUmemcpyAttributes attributes{};
    attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    attributes.flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE;
    std::size_t first = 0;
    if (driver.copy_batch(to_.data(), from_.data(), num_bytes_.data(), copies.size(), &attributes, &first, 1,
                          stream_) == CUDA_SUCCESS) {
      return true;
    }
  }
#endif
  for (const GpuCopy& one : copies) {
    if (driver.copy_async(address_of(one.to), address_of(one.from), one.num_bytes, stream_) != CUDA_SUCCESS) {
      return false;
    }
  }
  return true;
}

/// Has the stream tell that what it did up to here has ended.
bool Lane::mark(const Driver& driver, bool by_event, Begun* begun) {
  if (!by_event) {
    begun->number = ++num_marks_;
    return driver.write_value(stream_, address_of(reinterpret_cast<std::byte*>(word_)), begun->number,
                              CU_STREAM_WRITE_VALUE_DEFAULT) == CUDA_SUCCESS;
  }
  if (spare_events_.empty()) {
    CUevent event = nullptr;
    if (driver.event_create(&event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) return false;
    spare_events_.push_back(event);
  }
  if (driver.event_record(spare_events_.back(), stream_) != CUDA_SUCCESS) return false;
  begun->event = spare_events_.back();
  spare_events_.pop_back();
  return true;
}

ucs_status_t Lane::status_of(const Driver& driver, const Begun& begun) const {
  if (begun.event == nullptr) {
    const std::uint64_t ended = std::atomic_ref(*word_).load(std::memory_order_acquire);
    return ended >= begun.number ? UCS_OK : UCS_INPROGRESS;
  }
  const CUresult result = driver.event_query(begun.event);
  if (result == CUDA_ERROR_NOT_READY) return UCS_INPROGRESS;
  return result == CUDA_SUCCESS ? UCS_OK : UCS_ERR_IO_ERROR;
}

bool Lane::look(const Driver& driver) {
  if (begun_.empty()) return false;
  while (!begun_.empty()) {
    const ucs_status_t status = status_of(driver, begun_.front());
    if (status == UCS_INPROGRESS) break;
    const Begun ended = std::move(begun_.front());
    begun_.pop_front();
    if (ended.event != nullptr) spare_events_.push_back(ended.event);
    for (const GpuCopies::Done& done : ended.done) done(status);
  }
  return true;
}

Streams::Streams(const Driver& driver, const GpuCopyOptions& options, int device) : driver_(driver), options_(options) {
  int least = 0;
  int greatest = 0;
  good_ = driver.retain_context(&context_, device) == CUDA_SUCCESS && driver.set_context(context_) == CUDA_SUCCESS &&
          driver.priority_range(&least, &greatest) == CUDA_SUCCESS;
  constexpr int kUsual = 0;
  for (Lane& lane : lanes_) good_ = good_ && lane.open(driver, kUsual);
  if (options.small_bytes == 0) return;
  for (Lane& lane : small_lanes_) good_ = good_ && lane.open(driver, greatest);
}

Streams::~Streams() {
  driver_.set_context(context_);
  for (Lane& lane : lanes_) lane.close(driver_);
  for (Lane& lane : small_lanes_) lane.close(driver_);
}

void Streams::start_small(std::span<GpuCopy> copies) {
  start(small_lanes_[next_small_++ % small_lanes_.size()], copies, options_.batches);
}

void Streams::start(GpuCopy& copy) {
  start(lanes_[next_++ % lanes_.size()], std::span(&copy, 1), /*in_one_call=*/false);
}

void Streams::start(Lane& lane, std::span<GpuCopy> copies, bool in_one_call) {
  if (good_ && driver_.set_context(context_) == CUDA_SUCCESS &&
      lane.start(driver_, copies, in_one_call, options_.events)) {
    return;
  }
  for (GpuCopy& copy : copies) copy.done(UCS_ERR_IO_ERROR);
}

bool Streams::look() {
  bool busy = false;
  for (Lane& lane : small_lanes_) busy |= lane.look(driver_);
  for (Lane& lane : lanes_) busy |= lane.look(driver_);
  return busy;
}

}  // namespace ferry::ucx_card
