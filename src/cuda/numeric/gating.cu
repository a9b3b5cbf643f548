/// Gating on a GPU. A warp takes a token at a time; the experts' keys are in its registers.

#include "cuda/numeric/gating.cuh"

#include <algorithm>

#include "cuda/driver/launch.hpp"
#include "cuda/numeric/gating.hpp"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

constexpr int kBlockWarps = 4;
/// More than run together at the registers they take, so that blocks which end early are replaced.
constexpr std::int64_t kBlocksPerSm = 16;
/// Blocks whose registers a multiprocessor holds: 64 of each thread suffice for runs of 8 without spills, 96 for 16.
template <int kRun>
constexpr unsigned kResidentBlocks = kRun <= 8 ? 8 : 5;
/// Tokens whose choices the kernel that keeps to the capacity loads at once.
constexpr int kAhead = 8;

/// Words of shared memory of a warp: none where groups are whole lanes.
__host__ __device__ int scratch_words(const GatingKernelParams& params) {
  if (!numeric::is_group_limited(params.gating.options) || params.group_lanes > 0) return 0;
  return params.gating.num_experts + params.gating.options.num_groups;
}

template <int kRun>
__global__ void __launch_bounds__(kBlockWarps* kWarpLanes, kResidentBlocks<kRun>)
    gating_kernel(GatingKernelParams params) {
  std::uint32_t* const scratch =
      reinterpret_cast<std::uint32_t*>(dynamic_shared()) + warp_idx() * scratch_words(params);
  float bias[kRun];
  load_bias<kRun>(params, bias);
  const auto num_warps = static_cast<std::int64_t>(gridDim.x) * kBlockWarps;
  const auto never = [](int) { return false; };
  for (std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * kBlockWarps + warp_idx();
       token < params.gating.num_tokens; token += num_warps) {
    LaneRow<kRun> row;
    const int id = choose<kRun>(params, token, bias, row, scratch, never);
    store_choice(params.gating, token, id, weigh<kRun>(params, token, row, id));
  }
}

/// One warp goes over the choices of all tokens in order and keeps to the capacity.
template <int kRun>
__global__ void __launch_bounds__(kWarpLanes) capacity_kernel(GatingKernelParams params) {
  const GatingParams& gating = params.gating;
  auto* const counts = reinterpret_cast<std::uint32_t*>(dynamic_shared());
  std::uint32_t* const scratch = counts + gating.num_experts;
  const bool drops = gating.options.overflow == GatingOverflow::kDrop;
  const auto is_full = [&](int expert) { return static_cast<std::int64_t>(counts[expert]) >= gating.options.capacity; };
  for (int expert = lane_idx(); expert < gating.num_experts; expert += kWarpLanes) counts[expert] = 0;
  __syncwarp();
  float bias[kRun];
  load_bias<kRun>(params, bias);
  for (std::int64_t first = 0; first < gating.num_tokens; first += kAhead) {
    int ids[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ids[i] = first + i < gating.num_tokens ? load_choice(gating, first + i) : -1;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const bool overflows = ids[i] >= 0 && is_full(ids[i]);
      if (__any_sync(kAllLanes, overflows)) {
        if (!drops) {
          LaneRow<kRun> row;
          ids[i] = choose<kRun>(params, first + i, bias, row, scratch, is_full);
          store_choice(gating, first + i, ids[i], weigh<kRun>(params, first + i, row, ids[i]));
        } else if (overflows) {
          ids[i] = -1;
          store_choice(gating, first + i, -1, 0.0F);
        }
      }
      __syncwarp();
      if (ids[i] >= 0) ++counts[ids[i]];
      __syncwarp();
    }
  }
}

using Kernel = void (*)(GatingKernelParams);

struct Kernels {
  int run = 0;
  Kernel choose = nullptr;
  Kernel limit = nullptr;
};

template <int kRun>
constexpr Kernels kKernels = {kRun, gating_kernel<kRun>, capacity_kernel<kRun>};
const Kernels kAllKernels[] = {kKernels<1>, kKernels<2>, kKernels<4>, kKernels<8>, kKernels<12>, kKernels<16>};

bool is_power_of_two(int value) { return value > 0 && (value & (value - 1)) == 0; }

GatingKernelParams kernel_params(const GatingParams& gating, int run) {
  constexpr int kVector = 4;
  GatingKernelParams params;
  params.gating = gating;
  params.run_length = numeric::gating_run_length(gating.num_experts);
  const std::size_t vector_bytes = kVector * (gating.is_bfloat16 ? sizeof(std::uint16_t) : sizeof(float));
  params.whole_runs = params.run_length == run && run % kVector == 0 && gating.num_experts % run == 0 &&
                      reinterpret_cast<std::uintptr_t>(gating.logits) % vector_bytes == 0;
  const int group_size = gating.num_experts / gating.options.num_groups;
  const int group_lanes = group_size / params.run_length;
  if (group_size % params.run_length == 0 && is_power_of_two(group_lanes)) params.group_lanes = group_lanes;
  return params;
}

}  // namespace

cudaError_t launch_gating(const GatingParams& gating, int num_sms, cudaStream_t stream) {
  if (gating.num_tokens == 0) return cudaSuccess;
  const int run_length = numeric::gating_run_length(gating.num_experts);
  const Kernels* kernels = std::begin(kAllKernels);
  while (kernels->run < run_length) ++kernels;
  const GatingKernelParams params = kernel_params(gating, kernels->run);
  const std::size_t scratch_bytes = static_cast<std::size_t>(scratch_words(params)) * sizeof(std::uint32_t);
  const std::int64_t num_blocks = std::min((gating.num_tokens + kBlockWarps - 1) / kBlockWarps, num_sms * kBlocksPerSm);
  const LaunchShape shape{static_cast<unsigned>(num_blocks), kBlockWarps * kWarpLanes, kBlockWarps * scratch_bytes};
  const cudaError_t error = launch_kernel(kernels->choose, shape, params, stream);
  if (error != cudaSuccess || gating.options.capacity == 0) return error;
  const std::size_t counts_bytes = static_cast<std::size_t>(gating.num_experts) * sizeof(std::uint32_t);
  return launch_kernel(kernels->limit, {1, kWarpLanes, counts_bytes + scratch_bytes}, params, stream);
}

cudaError_t load_gating_kernels() {
  for (const Kernels& kernels : kAllKernels) {
    for (const Kernel kernel : {kernels.choose, kernels.limit}) {
      cudaFuncAttributes attributes;
      const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda
