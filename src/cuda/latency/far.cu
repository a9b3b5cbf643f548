/// A call of latency mode that this rank refuses, in groups of several nodes (cuda/far/params.hpp): one kernel tells
/// far ranks, and one takes what far ranks have sent, before the kernel that does so inside the node.

#include "cuda/latency/far_keeper.cuh"
#include "cuda/latency/far_words.cuh"
#include "cuda/latency/kernel_row.hpp"
#include "cuda/latency/kernels.hpp"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

constexpr int kFarThreads = 256;

/// Imports the headers of the call of this turn. A warp for each far rank, by turns.
__global__ void __launch_bounds__(kFarThreads) far_headers_kernel(const __grid_constant__ FarRefusalParams params) {
  const LatencyParams& call = params.call;
  if (warp_idx() == 0) publish_grants(call, params.far);
  const std::uint64_t number = turn_number(call, params.kind);
  const std::uint64_t* const grant = grant_word(call, call.ranks.rank, params.kind, call.ranks.rank, number);
  const SentCall sent{number, payload_of(load_relaxed_system(grant)), 1, 0};
  constexpr int kWarps = kFarThreads / kWarpLanes;
#pragma unroll 1
  for (int idx = warp_idx(); idx < params.far.layout.num_far(); idx += kWarps) {
    const int source = params.far.layout.far_rank(idx);
    LaneFarWords header;
    if (!await_far_header(call, params.far, params.kind, sent, source, header)) return;
    import_header(call, params.far, params.kind, sent, source, header);
    FarKeeper keeper(params.far, source);
    keeper.note(call, header);
    keeper.keep(call, params.far);
  }
  if (warp_idx() == 0) keep_departures(call, params.far, [] { return true; });
}

/// Tells far ranks that this rank refuses a call. One warp.
__global__ void __launch_bounds__(kWarpLanes) far_refusal_kernel(const __grid_constant__ FarRefusalParams params) {
  int* const sets = reinterpret_cast<int*>(dynamic_shared());
  const LatencyParams& call = params.call;
  const std::uint64_t number = turn_number(call, params.kind);
  grant_owed_set(call, params.kind, number);
  own_set(call, params.kind, number);
  __syncwarp();
  if (params.kind == LatencyKind::kDispatch) clear_next_places(params.far, number, lane_idx(), kWarpLanes);
  publish_grants(call, params.far);
  if (!await_far_turn(call, params.far, params.kind, number, sets, FarLook(params.far, params.kind))) return;
  hide_far_ranks(call, params.far, params.kind, number);
  LatencyHeader header;
  header.record_number = call.record_number;
  write_far_headers(call, params.far, params.kind, number, header);
  __syncwarp();
#pragma unroll 1
  for (int idx = lane_idx(); idx < params.far.layout.num_far(); idx += kWarpLanes) {
    const int rank = params.far.layout.far_rank(idx);
    const FarPart front = part_with_header(call, params.far, params.kind, idx, sets[rank], 0, kFarHeaderBytes);
    post_message(call, params.far, static_cast<int>(params.kind), rank, number, {front, {}, sets[rank]});
  }
}

std::size_t refusal_bytes(const FarRefusalParams& /*params*/) { return kMaxRanks * sizeof(int); }

constexpr KernelRow<FarRefusalParams> kHeaders = {{far_headers_kernel}, kFarThreads, nullptr};
constexpr KernelRow<FarRefusalParams> kRefusal = {{far_refusal_kernel}, kWarpLanes, refusal_bytes};

}  // namespace

cudaError_t launch_far_refusal(const FarRefusalParams& params, cudaStream_t stream) {
  const cudaError_t error = kRefusal.launch(0, 1, false, params, stream);
  return error == cudaSuccess ? kHeaders.launch(0, 1, false, params, stream) : error;
}

cudaError_t load_far_kernels() {
  cudaError_t error = load_rows(kHeaders, kRefusal);
  if (error == cudaSuccess) error = load_nodes_dispatch();
  return error == cudaSuccess ? load_nodes_combine() : error;
}

}  // namespace ferry::cuda
