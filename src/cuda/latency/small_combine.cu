/// A combine whose sums travel as words, in one kernel (small_combine.cuh). All blocks must run at once, as in
/// combine_whole.cu.

#include "cuda/driver/launch.hpp"
#include "cuda/latency/small_combine.cuh"
#include "cuda/sync/kernel_order.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

template <bool kFloat32>
__global__ void __launch_bounds__(kCombineThreads)
    small_combine_kernel(const __grid_constant__ SmallCombineParams params) {
  await_kernel_before();
  const LatencyParams& call = params.send.call;
  auto& shared = *reinterpret_cast<SmallCombineShared*>(dynamic_shared());
  if (is_clerk()) {
    if (warp_idx() == 0) announce_small(params, shared);
    if (warp_idx() == 1) keep_small_books(call);
    return;
  }
  if (warp_idx() == 0) {
    take_small_turn(call, shared);
    __syncthreads();
    if (lane_idx() == 0 && shared.number != 0) enter_whole_call(call, LatencyKind::kCombine);
    return;
  }
  SmallAdder<kFloat32> adder(params, shared);
  const std::int32_t home = adder.load_home(first_combine_unit());  // for later
  if (adder.send()) adder.receive(home);
}

using Kernel = void (*)(SmallCombineParams);
constexpr Kernel kKernels[] = {small_combine_kernel<false>, small_combine_kernel<true>};

SmallUnits units_of(std::int64_t row_bytes, int num_rows, int num_warps) {
  const RowParts parts = RowParts::of(row_bytes, num_rows, num_warps);
  return {SmallDivisor::of(parts.num_parts), parts.part_bytes, num_rows * parts.num_parts};
}

}  // namespace

bool is_small(const LatencyCombineParams& params) {
  const LatencyParams& call = params.send.call;
  return params.send.rows.words && call.ranks.num_ranks <= kSmallRanks;
}

cudaError_t launch_small_combine(const LatencyCombineParams& params, cudaStream_t stream) {
  const LatencyParams& call = params.send.call;
  const std::int64_t row_bytes = params.send.rows.row_bytes;
  const int num_warps = (call.num_blocks - 1) * kCombineWarps;
  const int num_ranks = call.ranks.num_ranks;
  SmallCombineParams small;
  static_cast<LatencyCombineParams&>(small) = params;
  small.ranks = SmallDivisor::of(num_ranks);
  small.sends = units_of(row_bytes, static_cast<int>(call.max_tokens) * num_ranks, num_warps);
  small.receives = units_of(row_bytes, static_cast<int>(call.num_tokens), num_warps);
  const LaunchShape shape{static_cast<unsigned>(call.num_blocks), kCombineThreads, sizeof(SmallCombineShared),
                          call.overlaps};
  return launch_kernel(kKernels[params.send.rows.float32 ? 1 : 0], shape, small, stream);
}

cudaError_t load_small_combine_kernels() {
  for (const Kernel kernel : kKernels) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda
