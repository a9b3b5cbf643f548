/// The send half of a split combine as a kernel.

#include "cuda/latency/combine_send.cuh"

#include <algorithm>

#include "cuda/driver/launch.hpp"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

template <bool kFloat32, bool kWords>
__global__ void __launch_bounds__(kCombineThreads)
    combine_send_kernel(const __grid_constant__ CombineSendParams params) {
  const LatencyParams& call = params.call;
  const CombineStart start = CombineStart::of(call);
  const CombineSendShared shared = CombineSendShared::at(dynamic_shared(), call.ranks.num_ranks);
  if (!send_combine<kFloat32, false, kWords>(params, shared, start) || warp_idx() != 0) return;
  const std::uint64_t number = *shared.number;
  if (lane_idx() != 0) return;
  if (blockIdx.x == 0) {
    *call.tables.combine = {number, static_cast<std::uint32_t>(shared.sets[call.ranks.rank]), 1, 0};
  }
  end_turn(call, LatencyKind::kCombine, number);
}

using SendKernel = void (*)(CombineSendParams);
constexpr SendKernel kSendKernels[] = {combine_send_kernel<false, false>, combine_send_kernel<true, false>,
                                       combine_send_kernel<false, true>, combine_send_kernel<true, true>};

/// Small batches take more blocks rather than more warps of each: code that is new to a multiprocessor comes slowly.
constexpr std::int64_t kUnitsPerBlock = 4;

}  // namespace

int combine_blocks(const LatencyParams& call, const CombineRows& rows, int num_sms) {
  const std::int64_t num_steps = (rows.row_bytes + RowParts::kStepBytes - 1) / RowParts::kStepBytes;
  const std::int64_t num_units = call.max_tokens * call.ranks.num_ranks * num_steps;
  const std::int64_t most = std::clamp(num_sms, 2, kMaxCallBlocks);
  return 1 + static_cast<int>(std::clamp<std::int64_t>((num_units + kUnitsPerBlock - 1) / kUnitsPerBlock, 1, most - 1));
}

cudaError_t launch_combine_send(const CombineSendParams& params, cudaStream_t stream) {
  const LaunchShape shape{static_cast<unsigned>(params.call.num_blocks), static_cast<unsigned>(kCombineThreads),
                          CombineSendShared::at(nullptr, params.call.ranks.num_ranks).size_bytes};
  return launch_kernel(kSendKernels[params.rows.kernel_idx()], shape, params, stream);
}

cudaError_t load_combine_send_kernels() {
  for (const SendKernel kernel : kSendKernels) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda
