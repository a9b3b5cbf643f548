/// The send half of a split latency_dispatch as a kernel.

#include "cuda/latency/dispatch_send.cuh"

#include "cuda/driver/launch.hpp"
#include "cuda/latency/codec_kernels.hpp"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

template <Codec kCodec, bool kHomes>
__global__ void __launch_bounds__(kDispatchThreads)
    dispatch_send_kernel(const __grid_constant__ DispatchSendParams params) {
  auto& shared = *reinterpret_cast<DispatchSendShared*>(dynamic_shared());
  const LatencyParams& call = params.call;
  send_dispatch<kCodec, kHomes>(
      params, shared, [] {}, [] {});
  if (shared.number == 0 || warp_idx() != 0) return;
  if (blockIdx.x == 0) grant_owed_set(call, LatencyKind::kDispatch, shared.number);
  if (lane_idx() != 0) return;
  if (blockIdx.x == 0) {
    *call.tables.dispatch = {shared.number, static_cast<std::uint32_t>(shared.sets[call.ranks.rank]), 1, 0};
  }
  end_turn(call, LatencyKind::kDispatch, shared.number);
}

template <bool kHomes>
constexpr CodecKernels<DispatchSendParams> kKernels = {dispatch_send_kernel<Codec::kPlain, kHomes>,
                                                       dispatch_send_kernel<Codec::kFp8, kHomes>,
                                                       dispatch_send_kernel<Codec::kInt8, kHomes>};

}  // namespace

cudaError_t launch_dispatch_send(const DispatchSendParams& params, cudaStream_t stream) {
  const LaunchShape shape{static_cast<unsigned>(params.call.num_blocks), kDispatchThreads,
                          DispatchSendShared::size_bytes(params.call.num_experts)};
  const auto& kernels = has_homes(params.placement) ? kKernels<true> : kKernels<false>;
  return launch_kernel(kernels.of(params.quantize), shape, params, stream);
}

cudaError_t load_dispatch_send_kernels() {
  const std::size_t most_shared_bytes = DispatchSendShared::size_bytes(static_cast<int>(kMaxExperts));
  const cudaError_t error = kKernels<false>.load(most_shared_bytes);
  return error == cudaSuccess ? kKernels<true>.load(most_shared_bytes) : error;
}

}  // namespace ferry::cuda
