/// The receive half of a split latency_dispatch as a kernel.

#include "cuda/latency/dispatch_receive.cuh"

#include "cuda/driver/launch.hpp"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

/// `kHomes`: see receive_dispatch().
template <bool kHomes>
__global__ void __launch_bounds__(kDispatchThreads, 1)
    dispatch_receive_kernel(const __grid_constant__ DispatchReceiveParams params) {
  const LatencyParams& call = params.call;
  const ReceiveMemory memory = ReceiveMemory::at(dynamic_shared(), call.num_experts, call.num_local_experts);
  prepare_receive(call, params, HomesLook(call, params), memory.experts, *memory.shared);
  // A send half that found the group broken has not written what follows.
  if (__syncthreads_or(static_cast<int>(is_broken(call.ranks))) != 0) return;
  SentCall& words = *call.tables.dispatch;
  const volatile SentCall& seen = words;
  const SentCall sent{seen.number, seen.set, seen.pending, 0};  // until all blocks are done it stays as it is
  if (sent.pending == 0) {
    if (reports() && threadIdx.x == 0) report_not_sent(call);
    return;
  }
  if (!receive_dispatch<kHomes>(call, static_cast<const DispatchReceiveRows&>(params), sent, memory.experts,
                                *memory.shared)) {
    return;
  }
  if (!is_last_block(words.arrivals)) return;
  if (threadIdx.x == 0) {
    words.pending = 0;
    words.arrivals = 0;
  }
  if (warp_idx() == 0) grant_set(call, LatencyKind::kDispatch, sent.number, static_cast<int>(sent.set));
}

std::size_t shared_bytes_of(int num_experts, int num_local_experts) {
  return ReceiveMemory::at(nullptr, num_experts, num_local_experts).size_bytes;
}

}  // namespace

cudaError_t launch_dispatch_receive(const DispatchReceiveParams& params, cudaStream_t stream) {
  const LatencyParams& call = params.call;
  const LaunchShape shape{static_cast<unsigned>(call.num_blocks), kDispatchThreads,
                          shared_bytes_of(call.num_experts, call.num_local_experts)};
  const auto kernel = has_homes_or_counters(params) ? dispatch_receive_kernel<true> : dispatch_receive_kernel<false>;
  return launch_kernel(kernel, shape, params, stream);
}

cudaError_t load_dispatch_receive_kernel() {
  constexpr int kExperts = static_cast<int>(kMaxExperts);
  cudaError_t error = cudaSuccess;
  for (const auto kernel : {dispatch_receive_kernel<false>, dispatch_receive_kernel<true>}) {
    if (error != cudaSuccess) break;
    error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes_of(kExperts, kExperts)));
  }
  return error;
}

}  // namespace ferry::cuda
