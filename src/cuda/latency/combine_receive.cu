/// The receive half of a split combine as a kernel.

#include "cuda/latency/combine_receive.cuh"

#include "cuda/driver/launch.hpp"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

template <bool kFloat32, bool kWords>
__global__ void __launch_bounds__(kCombineThreads)
    combine_receive_kernel(const __grid_constant__ CombineReceiveParams params) {
  const LatencyParams& call = params.call;
  const CombineStart start = CombineStart::of(call);
  const volatile SentCall& pending = *call.tables.combine;
  const SentCall sent{pending.number, pending.set, pending.pending, 0};
  // All threads or none: others wait for them.
  if (__syncthreads_or(static_cast<int>(is_broken(call.ranks) || sent.pending == 0)) != 0) return;
  const CombineReceiveShared shared = CombineReceiveShared::at(dynamic_shared(), call.ranks.num_ranks);
  bool good = receive_combine<kFloat32, false, kWords>(call, params, sent, shared, start.routed);
  if constexpr (kWords) good = __syncthreads_and(static_cast<int>(good)) != 0;
  if (!good) return;
  if (!is_last_block(call.tables.combine->arrivals)) return;
  if (threadIdx.x == 0) *call.tables.combine = {};
  if (warp_idx() == 0) grant_set(call, LatencyKind::kCombine, sent.number, static_cast<int>(sent.set));
}

using ReceiveKernel = void (*)(CombineReceiveParams);
constexpr ReceiveKernel kReceiveKernels[] = {combine_receive_kernel<false, false>, combine_receive_kernel<true, false>,
                                             combine_receive_kernel<false, true>, combine_receive_kernel<true, true>};

}  // namespace

cudaError_t launch_combine_receive(const CombineReceiveParams& params, cudaStream_t stream) {
  const LaunchShape shape{static_cast<unsigned>(params.call.num_blocks), static_cast<unsigned>(kCombineThreads),
                          CombineReceiveShared::at(nullptr, params.call.ranks.num_ranks).size_bytes};
  return launch_kernel(kReceiveKernels[params.rows.kernel_idx()], shape, params, stream);
}

cudaError_t load_combine_receive_kernels() {
  for (const ReceiveKernel kernel : kReceiveKernels) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda
