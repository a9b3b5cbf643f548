/// The part of latency mode between nodes (cuda/far/params.hpp): kernels that send to far ranks before a send half, and
/// that take what far ranks have sent before a receive half. Only the latter wait for far ranks, and their blocks for
/// nothing else.

#include <algorithm>

#include "cuda/latency/far_receive.cuh"
#include "cuda/latency/far_send.cuh"
#include "cuda/latency/kernel_row.hpp"
#include "cuda/latency/kernels.hpp"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

constexpr int kFarThreads = 256;

/// Shared memory of a dispatch's kernel where FarTargets follow.
FERRY_HOST_DEVICE constexpr std::size_t send_shared_bytes(int num_experts) {
  return round_up_part(DispatchSendShared::size_bytes(num_experts));
}

/// Sends a dispatch to far ranks.
template <Codec kCodec, bool kHomes>
__global__ void __launch_bounds__(kDispatchThreads, 1)
    far_rows_kernel(const __grid_constant__ FarDispatchParams params) {
  auto& shared = *reinterpret_cast<DispatchSendShared*>(dynamic_shared());
  auto& targets = *reinterpret_cast<FarTargets*>(dynamic_shared() + send_shared_bytes(params.send.call.num_experts));
  FarDispatchSender<kCodec, kHomes> sender(params, shared, targets);
  sender.send_all();
}

/// Parts of the tokens of one source that blocks import separately.
constexpr int kPartsPerSource = 2;

/// Imports one part of the tokens of a far rank; false when the group broke. All threads of a block.
__device__ bool import_part(const FarReceiveParams& params, const SentCall& sent, int source, int part) {
  const LatencyParams& call = params.call;
  const bool came = threadIdx.x != 0 || await_far(call, params.far, params.kind, sent.number, source);
  if (__syncthreads_and(static_cast<int>(came)) == 0) return false;
  bool same = true;
  if (warp_idx() == 0) {
    if (part == 0) {
      same = import_header(call, params.far, params.kind, sent, source);
    } else {
      const FarHeader& header = header_in(params.far, params.kind, static_cast<int>(sent.set), source);
      const ReceivedHeader received(header.words[lane_idx() < kLatencyHeaderWords ? lane_idx() : 0]);
      same = received.agreement() == call.agreement && call.agreement != 0;
    }
  }
  if (__syncthreads_and(static_cast<int>(same)) == 0) return true;
  FarImporter importer(params, sent, source);
  importer.import_all(part, kPartsPerSource);
  return true;
}

/// Imports a dispatch from far ranks. All blocks share the parts.
__global__ void __launch_bounds__(kFarThreads) far_import_kernel(const __grid_constant__ FarReceiveParams params) {
  if (blockIdx.x == 0 && warp_idx() == 0) publish_grants(params.call, params.far);
  const SentCall sent = far_call(params);
  if (sent.pending == 0) return;
  const FarLayout& layout = params.far.layout;
  bool whole = true;
#pragma unroll 1
  for (auto unit = static_cast<int>(blockIdx.x); whole && unit < layout.num_far() * kPartsPerSource;
       unit += static_cast<int>(gridDim.x)) {
    whole = import_part(params, sent, layout.far_rank(unit / kPartsPerSource), unit % kPartsPerSource);
  }
}

/// Imports the headers of a call that this rank refuses. A warp for each far rank, by turns.
__global__ void __launch_bounds__(kFarThreads) far_headers_kernel(const __grid_constant__ FarReceiveParams params) {
  const LatencyParams& call = params.call;
  if (warp_idx() == 0) publish_grants(call, params.far);
  const SentCall sent = far_call(params);
  if (sent.pending == 0) return;
  constexpr int kWarps = kFarThreads / kWarpLanes;
#pragma unroll 1
  for (int idx = warp_idx(); idx < params.far.layout.num_far(); idx += kWarps) {
    const int source = params.far.layout.far_rank(idx);
    const bool came = lane_idx() != 0 || await_far(call, params.far, params.kind, sent.number, source);
    if (__all_sync(kAllLanes, static_cast<int>(came)) == 0) return;
    __syncwarp();
    import_header(call, params.far, params.kind, sent, source);
  }
}

/// Tells far ranks that this rank refuses a call. One warp.
__global__ void __launch_bounds__(kWarpLanes) far_refusal_kernel(const __grid_constant__ FarRefusalParams params) {
  int* const sets = reinterpret_cast<int*>(dynamic_shared());
  const LatencyParams& call = params.call;
  const std::uint64_t number = turn_number(call, params.kind);
  own_set(call, params.kind, number);
  __syncwarp();
  publish_grants(call, params.far);
  if (!await_far_turn(call, params.far, params.kind, number, sets)) return;
  hide_far_ranks(call, params.far, params.kind, number);
  LatencyHeader header;
  header.record_number = call.record_number;
  write_far_headers(params.far, params.kind, header);
  __syncwarp();
#pragma unroll 1
  for (int idx = lane_idx(); idx < params.far.layout.num_far(); idx += kWarpLanes) {
    const int set = sets[params.far.layout.far_rank(idx)];
    post_far(call, params.far, params.kind, idx, set, number, static_cast<std::int64_t>(kFarHeaderBytes), {});
  }
}

std::size_t rows_bytes(const FarDispatchParams& params) {
  return send_shared_bytes(params.send.call.num_experts) + sizeof(FarTargets);
}
std::size_t most_rows_bytes() { return send_shared_bytes(static_cast<int>(kMaxExperts)) + sizeof(FarTargets); }
std::size_t refusal_bytes(const FarRefusalParams& /*params*/) { return kMaxRanks * sizeof(int); }

constexpr KernelRow<FarDispatchParams, 2 * kNumCodecs> kRows = {
    {far_rows_kernel<Codec::kPlain, false>, far_rows_kernel<Codec::kFp8, false>, far_rows_kernel<Codec::kInt8, false>,
     far_rows_kernel<Codec::kPlain, true>, far_rows_kernel<Codec::kFp8, true>, far_rows_kernel<Codec::kInt8, true>},
    kDispatchThreads,
    rows_bytes,
    most_rows_bytes};
constexpr KernelRow<FarReceiveParams, 2> kReceive = {{far_import_kernel, far_headers_kernel}, kFarThreads, nullptr};
constexpr KernelRow<FarRefusalParams> kRefusal = {{far_refusal_kernel}, kWarpLanes, refusal_bytes};

}  // namespace

cudaError_t launch_far_rows(const FarDispatchParams& params, bool homes, cudaStream_t stream) {
  const int idx = (homes ? kNumCodecs : 0) + codec_idx(params.send.quantize);
  return kRows.launch(idx, params.send.call.num_blocks, false, params, stream);
}

cudaError_t launch_far_receive(const FarReceiveParams& params, cudaStream_t stream) {
  const bool imports = params.kind == LatencyKind::kDispatch && !params.refuses;
  const int num_parts = kPartsPerSource * params.far.layout.num_far();
  const int num_blocks = imports ? std::min(num_parts, params.call.num_blocks) : 1;
  return kReceive.launch(imports ? 0 : 1, num_blocks, false, params, stream);
}

cudaError_t launch_far_refusal(const FarRefusalParams& params, cudaStream_t stream) {
  return kRefusal.launch(0, 1, false, params, stream);
}

cudaError_t load_far_kernels() {
  const cudaError_t error = load_rows(kRows, kReceive, kRefusal);
  return error == cudaSuccess ? load_nodes_combine() : error;
}

}  // namespace ferry::cuda
