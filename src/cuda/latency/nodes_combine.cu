/// The kernel of a combine of latency mode in groups of several nodes: each half. All blocks that wait for other ranks
/// must run at once, as in dispatch.cu.

#include "cuda/latency/nodes_combine.cuh"

#include "cuda/latency/kernel_row.hpp"
#include "cuda/latency/kernels.hpp"
#include "cuda/sync/kernel_order.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

using NodesHalf = EitherHalf<FarCombineParams, CombineReceiveParams>;

/// Makes a send half.
template <bool kFloat32>
__device__ void make_nodes_send_half(const FarCombineParams& params) {
  const LatencyParams& call = params.call;
  const CombineStart start = CombineStart::of(call);
  const CombineSendShared shared = CombineSendShared::at(dynamic_shared(), call.ranks.num_ranks, true);
  if (!send_nodes_combine<kFloat32>(params, shared, start)) return;
  if (warp_idx() == kPostingWarp && is_last_far_block(params.far)) post_returns(params.far, *shared.number);
  if (is_clerk() && warp_idx() == 0) publish_grants(call, params.far);  // of the set that end_send() has granted
  if (threadIdx.x != 0) return;
  const std::uint64_t number = *shared.number;
  if (blockIdx.x == 0) {
    *call.tables.combine = {number, static_cast<std::uint32_t>(shared.sets[call.ranks.rank]), 1, 0};
  }
  end_turn(call, LatencyKind::kCombine, number);
}

/// Makes a receive half.
template <bool kFloat32>
__device__ void make_nodes_receive_half(const CombineReceiveParams& params) {
  const LatencyParams& call = params.call;
  const CombineStart start = CombineStart::of(call);
  const volatile SentCall& pending = *call.tables.combine;
  const SentCall sent{pending.number, pending.set, pending.pending, 0};
  if (is_clerk() && warp_idx() == 1) publish_grants(call, params.far);
  // All threads or none, since the block has barriers later.
  if (__syncthreads_or(static_cast<int>(is_broken(call.ranks) || sent.pending == 0)) != 0) return;
  FarKeeper keeper;
  if (is_clerk() && !import_far_headers(call, params.far, sent, keeper)) return;
  const CombineReceiveShared shared = CombineReceiveShared::at(dynamic_shared(), call.ranks.num_ranks);
  if (!receive_combine<kFloat32, Receiving::kNodes>(call, params, sent, shared, start.routed)) return;
  const bool is_last = is_last_block(call.tables.combine->arrivals);
  keeper.keep(call, params.far);
  if (!is_last) return;
  if (threadIdx.x == 0) *call.tables.combine = {};
  if (warp_idx() == 0) leave_far_set(call, params.far, LatencyKind::kCombine, sent);
}

/// Makes either half.
template <bool kFloat32>
__global__ void __launch_bounds__(kCombineThreads) combine_nodes_kernel(const __grid_constant__ NodesHalf params) {
  await_kernel_before();
  if (params.receives) {
    make_nodes_receive_half<kFloat32>(params.receive);
  } else {
    make_nodes_send_half<kFloat32>(params.send);
  }
}

std::size_t half_bytes(const NodesHalf& params) {
  if (params.receives) return CombineReceiveShared::at(nullptr, params.receive.call.ranks.num_ranks).size_bytes;
  return CombineSendShared::at(nullptr, params.send.call.ranks.num_ranks, true).size_bytes;
}

constexpr KernelRow<NodesHalf, 2> kHalf = {
    {combine_nodes_kernel<false>, combine_nodes_kernel<true>}, kCombineThreads, half_bytes};

}  // namespace

cudaError_t launch_nodes_combine_send(const FarCombineParams& params, cudaStream_t stream) {
  return kHalf.launch(params.rows.float32 ? 1 : 0, params.call.num_blocks, params.call.overlaps, NodesHalf(params),
                      stream);
}

cudaError_t launch_nodes_combine_receive(const CombineReceiveParams& params, cudaStream_t stream) {
  return kHalf.launch(params.rows.float32 ? 1 : 0, params.call.num_blocks, params.call.overlaps, NodesHalf(params),
                      stream);
}

cudaError_t load_nodes_combine() { return kHalf.load(); }

}  // namespace ferry::cuda
