#include <cstdint>

#include "device/cuda_status.hpp"
#include "device/device_memory.hpp"
#include "device/launch.hpp"
#include "ferry/device/memory_order.cuh"

namespace ferry::tools {

namespace {

using device::GpuMemory;

constexpr unsigned kPauseNs = 100;

__global__ void delay_kernel(std::uint64_t duration_ns) {
  const std::uint64_t end_ns = GpuMemory::now_ns() + duration_ns;
  while (GpuMemory::now_ns() < end_ns) __nanosleep(kPauseNs);
}

}  // namespace

Status delay_stream(Stream stream, std::int64_t duration_ns) {
  return cuda_status("delay kernel", launch(delay_kernel, {}, static_cast<std::uint64_t>(duration_ns), stream));
}

}  // namespace ferry::tools
