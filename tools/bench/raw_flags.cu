#include <cstdint>

#include "bench/raw_exchange.hpp"
#include "device/cuda_status.hpp"
#include "device/launch.hpp"
#include "ferry/device/memory_order.cuh"

namespace ferry::tools {

namespace {

using device::GpuMemory;

/// One thread per target.
__global__ void __launch_bounds__(kMaxRawTargets, 1) flag_kernel(const __grid_constant__ RawFlagParams params) {
  const auto target = static_cast<int>(threadIdx.x);
  if (target >= params.num_targets) return;
  const std::uint64_t end_ns = GpuMemory::now_ns() + static_cast<std::uint64_t>(params.timeout_ns);
  for (int round = 0; round < params.num_rounds; ++round) {
    const std::uint64_t value = params.first + static_cast<std::uint64_t>(round);
    GpuMemory::store_release_system(params.theirs[target], value);
    while (GpuMemory::load_acquire_system(params.mine[target]) < value) {
      if (GpuMemory::now_ns() < end_ns) continue;
      *params.failed = 1;
      return;
    }
  }
}

}  // namespace

Status raw_flag_rounds(const RawFlagParams& params, Stream stream) {
  return cuda_status("raw flags", launch(flag_kernel, {1, kMaxRawTargets}, params, stream));
}

}  // namespace ferry::tools
