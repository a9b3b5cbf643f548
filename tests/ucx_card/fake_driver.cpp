#include "ucx_card/fake_driver.hpp"

#include <cuda.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "ucx_card/gpu_mover_ring.hpp"

struct CUstream_st {
  std::thread kernel;
};

namespace ferry::test {
namespace {

using ucx_card::MoverCommand;
using ucx_card::MoverLaunch;
using ucx_card::MoverRing;

void* pointer_to(CUdeviceptr address) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)); }

std::uint64_t load(std::uint64_t& word) { return std::atomic_ref(word).load(std::memory_order_acquire); }

void store(std::uint64_t& word, std::uint64_t value) { std::atomic_ref(word).store(value, std::memory_order_release); }

/// False: the command is not there.
bool run_command(MoverCommand& command, std::uint64_t number) {
  std::uint64_t halves[8];
  for (std::size_t i = 0; i < std::size(halves); ++i) {
    const std::uint64_t word = load(command.words[i]);
    if (word >> 32 != (number & 0xffffffff)) return false;
    halves[i] = word & 0xffffffff;
  }
  const auto content = [&](int i) { return halves[2 * i + 1] << 32 | halves[2 * i]; };
  std::memcpy(pointer_to(content(0)), pointer_to(content(1)), content(2) & 0xffffffff);
  return true;
}

void run_kernel(const MoverLaunch launch) {
  MoverRing* const ring = launch.ring;
  std::uint64_t max_commands = 0;
  std::uint64_t max_looks = 0;
  {
    FakeDriver& driver = FakeDriver::instance();
    const std::lock_guard lock(driver.mutex);
    max_commands = driver.max_commands;
    max_looks = driver.max_looks;
  }
  std::uint64_t number = launch.first;
  std::uint64_t express = launch.express_first;
  std::uint64_t num_commands = 0;
  for (std::uint64_t num_looks = 0; num_looks < max_looks && num_commands < max_commands; ++num_looks) {
    if (run_command(ring->large.commands[number % ucx_card::kMoverCommands], number)) {
      for (std::uint64_t& is_done : ring->is_done) store(is_done, number);
      ++number;
    } else if (run_command(ring->express.commands[express % ucx_card::kMoverCommands], express)) {
      store(ring->express_done, express);
      ++express;
    } else {
      std::this_thread::yield();
      continue;
    }
    ++num_commands;
    num_looks = 0;
  }
  store(ring->next, number);
  store(ring->express_next, express);
  store(ring->ended, launch.number);
}

}  // namespace

FakeDriver& FakeDriver::instance() {
  static FakeDriver& driver = *new FakeDriver;
  return driver;
}

}  // namespace ferry::test

namespace ferry::ucx_card {

bool load_mover(CUfunction* kernel) {
  test::FakeDriver& driver = test::FakeDriver::instance();
  const std::lock_guard lock(driver.mutex);
  *kernel = nullptr;
  return driver.has_kernels;
}

}  // namespace ferry::ucx_card

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

CUresult cuCtxPushCurrent_v2(CUcontext /*context*/) { return CUDA_SUCCESS; }

CUresult cuCtxPopCurrent_v2(CUcontext* /*context*/) { return CUDA_SUCCESS; }

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
  constexpr size_t kPage = 4096;
  *memory = std::aligned_alloc(kPage, (num_bytes + kPage - 1) / kPage * kPage);
  return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void* memory) {
  std::free(memory);
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr* memory, size_t /*num_bytes*/) {
  *memory = 0;
  return CUDA_SUCCESS;
}

CUresult cuMemFree_v2(CUdeviceptr /*memory*/) { return CUDA_SUCCESS; }

CUresult cuMemsetD8Async(CUdeviceptr /*memory*/, unsigned char /*value*/, size_t /*count*/, CUstream /*stream*/) {
  return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return CUDA_SUCCESS;
}

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned /*flags*/, int /*priority*/) {
  *stream = new CUstream_st;
  return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream /*stream*/) { return CUDA_SUCCESS; }

CUresult cuStreamSynchronize(CUstream stream) {
  if (stream->kernel.joinable()) stream->kernel.join();
  return CUDA_SUCCESS;
}

CUresult cuStreamDestroy_v2(CUstream stream) {
  cuStreamSynchronize(stream);
  delete stream;
  return CUDA_SUCCESS;
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t num_bytes, CUstream /*stream*/) {
  FakeDriver& driver = FakeDriver::instance();
  const std::lock_guard lock(driver.mutex);
  if (driver.refuses_copies) return CUDA_ERROR_INVALID_VALUE;
  ++driver.num_copies;
  std::memcpy(ferry::test::pointer_to(to), ferry::test::pointer_to(from), num_bytes);
  return CUDA_SUCCESS;
}

CUresult cuStreamWriteValue64_v2(CUstream /*stream*/, CUdeviceptr address, cuuint64_t value, unsigned /*flags*/) {
  __atomic_store_n(static_cast<cuuint64_t*>(ferry::test::pointer_to(address)), value, __ATOMIC_RELEASE);
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction /*kernel*/, unsigned /*grid_x*/, unsigned /*grid_y*/, unsigned /*grid_z*/,
                        unsigned /*block_x*/, unsigned /*block_y*/, unsigned /*block_z*/, unsigned /*shared_bytes*/,
                        CUstream stream, void** arguments, void** /*extra*/) {
  {
    FakeDriver& driver = FakeDriver::instance();
    const std::lock_guard lock(driver.mutex);
    if (driver.refuses_launches) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
    ++driver.num_launches;
  }
  // After what the stream has.
  cuStreamSynchronize(stream);
  stream->kernel = std::thread(&ferry::test::run_kernel, *static_cast<ferry::ucx_card::MoverLaunch*>(arguments[0]));
  return CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* /*mode*/) { return CUDA_SUCCESS; }

}  // extern "C"
