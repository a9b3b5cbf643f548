/// A combine of latency mode in one kernel: every block makes its part of the send half, then its part of the receive
/// half. All blocks must run at once: there is at most one for each multiprocessor of the rank.

#include "cuda/driver/launch.hpp"
#include "cuda/latency/combine_receive.cuh"
#include "cuda/latency/combine_send.cuh"
#include "cuda/sync/kernel_order.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

template <bool kFloat32, bool kWords>
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const __grid_constant__ LatencyCombineParams params) {
  await_kernel_before();
  const LatencyParams& call = params.send.call;
  const CombineStart start = CombineStart::of(call);
  const CombineSendShared send = CombineSendShared::at(dynamic_shared(), call.ranks.num_ranks);
  const CombineReceiveShared receive =
      CombineReceiveShared::at(dynamic_shared() + send.size_bytes, call.ranks.num_ranks);
  if (!send_combine<kFloat32, true, kWords>(params.send, send, start)) return;
  const SentCall sent{*send.number, static_cast<std::uint32_t>(send.sets[call.ranks.rank]), 1, 0};
  if (!receive_combine<kFloat32, false, kWords>(call, params.receive, sent, receive, start.routed)) return;
  if (is_clerk() && threadIdx.x == 0) leave_whole_call(call, LatencyKind::kCombine, sent);
}

using Kernel = void (*)(LatencyCombineParams);
constexpr Kernel kKernels[] = {combine_kernel<false, false>, combine_kernel<true, false>, combine_kernel<false, true>,
                               combine_kernel<true, true>};

}  // namespace

cudaError_t launch_latency_combine(const LatencyCombineParams& params, cudaStream_t stream) {
  if (is_small(params)) return launch_small_combine(params, stream);
  const int num_ranks = params.send.call.ranks.num_ranks;
  const LaunchShape shape{
      static_cast<unsigned>(params.send.call.num_blocks), kCombineThreads,
      CombineSendShared::at(nullptr, num_ranks).size_bytes + CombineReceiveShared::at(nullptr, num_ranks).size_bytes,
      params.send.call.overlaps};
  return launch_kernel(kKernels[params.send.rows.kernel_idx()], shape, params, stream);
}

cudaError_t load_latency_combine_kernels() {
  for (const Kernel kernel : kKernels) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda
