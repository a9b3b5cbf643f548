#include "ucx_card/fake_driver.hpp"

#include <cuda.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <set>

struct CUstream_st {
  struct Step {
    std::size_t num_bytes = 0;
    std::function<void()> run;
  };
  std::deque<Step> steps;
};

struct CUevent_st {
  bool has_ended = true;
};

namespace ferry::test {
namespace {

std::set<CUstream>& streams() {
  static std::set<CUstream>& all = *new std::set<CUstream>;
  return all;
}

/// With the mutex.
void run(CUstream stream) {
  while (!stream->steps.empty() && stream->steps.front().num_bytes <= FakeDriver::instance().max_bytes) {
    stream->steps.front().run();
    stream->steps.pop_front();
  }
}

void push(CUstream stream, std::size_t num_bytes, std::function<void()> step) {
  stream->steps.push_back({num_bytes, std::move(step)});
  run(stream);
}

void* pointer_to(CUdeviceptr address) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)); }

void push_copy(CUdeviceptr to, CUdeviceptr from, std::size_t num_bytes, CUstream stream) {
  push(stream, num_bytes, [=] { std::memcpy(pointer_to(to), pointer_to(from), num_bytes); });
}

void announce_copy() {
  FakeDriver& driver = FakeDriver::instance();
  std::function<void()> on_copy;
  {
    const std::lock_guard lock(driver.mutex);
    on_copy = driver.on_copy;
  }
  if (on_copy) on_copy();
}

}  // namespace

FakeDriver& FakeDriver::instance() {
  static FakeDriver& driver = *new FakeDriver;
  return driver;
}

void FakeDriver::let_pass(std::size_t num_bytes) {
  const std::lock_guard lock(mutex);
  max_bytes = num_bytes;
  for (CUstream stream : streams()) run(stream);
}

}  // namespace ferry::test

using ferry::test::FakeDriver;

extern "C" {

CUresult cuInit(unsigned /*flags*/) { return CUDA_SUCCESS; }

CUresult cuDeviceGetCount(int* count) {
  *count = 1;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice /*device*/) {
  *context = nullptr;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext /*context*/) { return CUDA_SUCCESS; }

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr /*address*/) {
  FakeDriver& driver = FakeDriver::instance();
  const std::lock_guard lock(driver.mutex);
  if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) {
    ++driver.num_questions;
    *static_cast<unsigned*>(data) = CU_MEMORYTYPE_DEVICE;
  } else {
    *static_cast<int*>(data) = 0;
  }
  return CUDA_SUCCESS;
}

/// Allocations have 1 MiB and begin at multiples of it.
CUresult cuMemGetAddressRange_v2(CUdeviceptr* begin, size_t* num_bytes, CUdeviceptr address) {
  constexpr CUdeviceptr kAllocation = 1 << 20;
  *begin = address / kAllocation * kAllocation;
  *num_bytes = kAllocation;
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr /*begin*/, size_t /*size*/, const CUmemAccessDesc* /*access*/, size_t /*count*/) {
  return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void** memory, size_t num_bytes, unsigned /*flags*/) {
  *memory = std::malloc(num_bytes);
  return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void* memory) {
  std::free(memory);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return CUDA_SUCCESS;
}

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned /*flags*/, int /*priority*/) {
  const std::lock_guard lock(FakeDriver::instance().mutex);
  *stream = new CUstream_st;
  ferry::test::streams().insert(*stream);
  return CUDA_SUCCESS;
}

CUresult cuStreamDestroy_v2(CUstream stream) {
  const std::lock_guard lock(FakeDriver::instance().mutex);
  ferry::test::streams().erase(stream);
  delete stream;
  return CUDA_SUCCESS;
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t num_bytes, CUstream stream) {
  ferry::test::announce_copy();
  FakeDriver& driver = FakeDriver::instance();
  const std::lock_guard lock(driver.mutex);
  if (driver.refuses_copies) return CUDA_ERROR_INVALID_VALUE;
  ++driver.num_copies;
  ferry::test::push_copy(to, from, num_bytes, stream);
  return CUDA_SUCCESS;
}

#if CUDA_VERSION >= 13000
CUresult cuMemcpyBatchAsync_v2(CUdeviceptr* to, CUdeviceptr* from, size_t* num_bytes, size_t count,
                               CUmemcpyAttributes* /*attributes*/, size_t* /*indices*/, size_t /*num_attributes*/,
                               CUstream stream) {
  ferry::test::announce_copy();
  FakeDriver& driver = FakeDriver::instance();
  const std::lock_guard lock(driver.mutex);
  if (driver.refuses_batches) return CUDA_ERROR_NOT_SUPPORTED;
  ++driver.num_batches;
  driver.num_copies_of_batches += static_cast<int>(count);
  for (size_t i = count; i-- > 0;) ferry::test::push_copy(to[i], from[i], num_bytes[i], stream);
  return CUDA_SUCCESS;
}
#endif

CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned /*flags*/) {
  const std::lock_guard lock(FakeDriver::instance().mutex);
  ferry::test::push(stream, 0, [=] {
    __atomic_store_n(static_cast<cuuint64_t*>(ferry::test::pointer_to(address)), value, __ATOMIC_RELEASE);
  });
  return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent* event, unsigned /*flags*/) {
  *event = new CUevent_st;
  return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent event) {
  delete event;
  return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
  FakeDriver& driver = FakeDriver::instance();
  const std::lock_guard lock(driver.mutex);
  ++driver.num_events;
  event->has_ended = false;
  ferry::test::push(stream, 0, [event] { event->has_ended = true; });
  return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event) {
  FakeDriver& driver = FakeDriver::instance();
  const std::lock_guard lock(driver.mutex);
  if (driver.fails_events) return CUDA_ERROR_ILLEGAL_ADDRESS;
  return event->has_ended ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* /*mode*/) { return CUDA_SUCCESS; }

}  // extern "C"
