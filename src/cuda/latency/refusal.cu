/// A rank that cannot make a call of latency mode: its peers learn of it where they wait for its header. Its program
/// knows already. The call's number goes by on all ranks alike, and its set here, if it has one.

#include "cuda/driver/launch.hpp"
#include "cuda/latency/words.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;

constexpr int kRefusalThreads = 256;

struct Shared {
  std::uint64_t number;  ///< 0: the group broke
  int set;
  int sets[kMaxRanks];
  int num_blocks[kMaxRanks];
};

/// The set of this call on this rank: the one that it has granted, or else kNoSet, which it grants now. All lanes of
/// one warp.
__device__ int own_set(const LatencyRefusalParams& params, std::uint64_t number) {
  const LatencyParams& call = params.call;
  std::uint64_t& granted = local_of(call).granted[static_cast<int>(params.kind)];
  const bool has_set = static_cast<volatile std::uint64_t&>(granted) >= number;
  __syncwarp();  // all lanes have read it
  if (!has_set) {
    if (lane_idx() == 0) granted = number;
    post_grant(call, params.kind, number, kNoSet);
    return kNoSet;
  }
  return static_cast<int>(
      payload_of(load_relaxed_system(grant_word(call, call.ranks.rank, params.kind, call.ranks.rank, number))));
}

/// Combine's rows come to one place from all ranks, so none may be on its way when the set is granted again.
__device__ bool wait_senders(const LatencyParams& call, std::uint64_t number, int set, const int* num_blocks) {
  bool came = true;
  const auto thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int rank = 0; rank < call.ranks.num_ranks; ++rank) {
#pragma unroll 1
    for (int block = thread; block < num_blocks[rank] && came; block += kRefusalThreads) {
      came = wait_word(call.ranks, {Awaited::kDone, rank, number}, done_words(call, call.ranks.rank, set, rank) + block)
                 .came;
    }
  }
  return __syncthreads_and(static_cast<int>(came)) != 0;
}

__global__ void __launch_bounds__(kRefusalThreads) refusal_kernel(const __grid_constant__ LatencyRefusalParams params) {
  auto& shared = *reinterpret_cast<Shared*>(dynamic_shared());
  const LatencyParams& call = params.call;
  if (warp_idx() == 0) {
    const std::uint64_t number = turn_number(call, params.kind);
    grant_owed_set(call, params.kind, number);
    const int set = own_set(params, number);
    LatencyHeader header;
    header.record_number = call.record_number;
    const bool whole = wait_grants(call, params.kind, number, shared.sets);
    if (whole) post_header(call, params.kind, number, header, shared.sets);
    if (lane_idx() == 0) {
      count_turn(call, params.kind, number);
      shared.number = whole ? number : 0;
      shared.set = set;
    }
  }
  __syncthreads();
  const std::uint64_t number = shared.number;
  const int set = shared.set;
  if (number == 0) return;
  const auto take = [&shared](int rank, const ReceivedHeader& header) {
    const std::int64_t blocks = header.num_blocks();
    if (lane_idx() == 0) shared.num_blocks[rank] = static_cast<int>(blocks);
  };
  if (await_headers(call, params.kind, set, number, take) == Outcome::kStop) return;
  if (set == kNoSet) return;
  if (params.kind == LatencyKind::kCombine && !wait_senders(call, number, set, shared.num_blocks)) return;
  if (warp_idx() == 0) grant_set(call, params.kind, number, set);
}

}  // namespace

cudaError_t launch_latency_refusal(const LatencyRefusalParams& params, cudaStream_t stream) {
  return launch_kernel(refusal_kernel, {1, kRefusalThreads, sizeof(Shared)}, params, stream);
}

cudaError_t load_latency_kernels() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(refusal_kernel));
  if (error == cudaSuccess) error = load_latency_dispatch_kernels();
  if (error == cudaSuccess) error = load_dispatch_send_kernels();
  if (error == cudaSuccess) error = load_dispatch_receive_kernel();
  if (error == cudaSuccess) error = load_latency_combine_kernels();
  if (error == cudaSuccess) error = load_combine_send_kernels();
  if (error == cudaSuccess) error = load_combine_receive_kernels();
  return error;
}

}  // namespace ferry::cuda
