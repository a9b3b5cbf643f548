#include <cuda_runtime_api.h>

#include <cstdint>

#include "bench/raw_exchange.hpp"
#include "device/cuda_status.hpp"

namespace ferry::tools {

namespace {

/// PTX ISA, special register %globaltimer: nanoseconds.
__device__ std::int64_t device_now_ns() {
  std::int64_t now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

/// PTX ISA, st and ld with memory consistency between GPUs.
__device__ void store_flag(std::uint64_t* flag, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(flag)), "l"(value) : "memory");
}
__device__ std::uint64_t load_flag(const std::uint64_t* flag) {
  std::uint64_t value = 0;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(flag)) : "memory");
  return value;
}

/// A thread for each target.
__global__ void __launch_bounds__(kMaxRawTargets, 1) flag_kernel(const __grid_constant__ RawFlagParams params) {
  const auto target = static_cast<int>(threadIdx.x);
  if (target >= params.num_targets) return;
  const std::int64_t end_ns = device_now_ns() + params.timeout_ns;
  for (int round = 0; round < params.num_rounds; ++round) {
    const std::uint64_t value = params.first + static_cast<std::uint64_t>(round);
    store_flag(params.theirs[target], value);
    while (load_flag(params.mine[target]) < value) {
      if (device_now_ns() < end_ns) continue;
      *params.failed = 1;
      return;
    }
  }
}

}  // namespace

Status raw_flag_rounds(const RawFlagParams& params, Stream stream) {
  flag_kernel<<<1, kMaxRawTargets, 0, static_cast<cudaStream_t>(stream.handle)>>>(params);
  return cuda_status("raw flags", cudaGetLastError());
}

}  // namespace ferry::tools
