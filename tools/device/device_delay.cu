#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/cuda_status.hpp"
#include "device/device_memory.hpp"

namespace ferry::tools {

namespace {

/// PTX ISA, special register %globaltimer: nanoseconds.
__device__ std::int64_t device_now_ns() {
  std::int64_t now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void delay_kernel(std::int64_t duration_ns) {
  const std::int64_t end_ns = device_now_ns() + duration_ns;
  while (device_now_ns() < end_ns) __nanosleep(100);
}

}  // namespace

Status delay_stream(Stream stream, std::int64_t duration_ns) {
  delay_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream.handle)>>>(duration_ns);
  return cuda_status("delay kernel", cudaGetLastError());
}

}  // namespace ferry::tools
