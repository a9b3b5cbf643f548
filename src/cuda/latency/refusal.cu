/// A call of latency mode that this rank refuses, by one block. Its peers find the refusal in its header; its own
/// program has the error already. The call's number is used up on all ranks alike, and so is this rank's set, if the
/// call has one.

#include "cuda/latency/absent_ranks.cuh"
#include "cuda/latency/kernel_row.hpp"
#include "cuda/latency/kernels.hpp"
#include "cuda/latency/mask.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

constexpr int kRefusalThreads = 256;

/// State of the block, in dynamic shared memory.
struct RefusalShared {
  std::uint64_t number;  ///< 0: the group broke
  int set;
  int sets[kMaxRanks];
  int num_blocks[kMaxRanks];
};

/// Posts the header of the refusal to every rank. All lanes of one warp.
__device__ void send_refusal(const LatencyRefusalParams& params, std::uint64_t number, int set, RefusalShared& shared) {
  const LatencyParams& call = params.call;
  LatencyHeader header;
  header.record_number = call.record_number;
  const bool whole = wait_for_turn<false>(call, params.kind, shared.sets, [] {}) != 0;
  if (whole) post_header(call, params.kind, number, header, shared.sets);
  if (lane_idx() != 0) return;
  count_turn(call, params.kind, number);
  shared.number = whole ? number : 0;
  shared.set = set;
}

/// Waits for the senders of a combine: all ranks store rows to one place, so none may be on its way when the set is
/// granted again.
__device__ bool wait_senders(const LatencyParams& call, std::uint64_t number, int set, const int* num_blocks) {
  bool came = true;
  const auto thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int rank = 0; rank < call.ranks.num_ranks; ++rank) {
#pragma unroll 1
    for (int block = thread; block < num_blocks[rank] && came; block += kRefusalThreads) {
      came = wait_word(call, {Awaited::kDone, rank, number}, done_words(call, call.ranks.rank, set, rank) + block).came;
    }
  }
  return __syncthreads_and(static_cast<int>(came)) != 0;
}

/// Waits until the set, if the call has one, can be granted again; false if not. All threads.
__device__ bool receive_refusal(const LatencyRefusalParams& params, RefusalShared& shared) {
  const LatencyParams& call = params.call;
  const std::uint64_t number = shared.number;
  const int set = shared.set;
  if (number == 0) return false;
  const auto take = [&shared](int rank, const ReceivedHeader& header) {
    const std::int64_t blocks = header.num_blocks();
    if (lane_idx() == 0) shared.num_blocks[rank] = static_cast<int>(blocks);
  };
  if (await_headers(call, params.kind, set, number, take) == Outcome::kStop) return false;
  if (set == kNoSet) return false;
  return params.kind == LatencyKind::kDispatch || wait_senders(call, number, set, shared.num_blocks);
}

__global__ void __launch_bounds__(kRefusalThreads) refusal_kernel(const __grid_constant__ LatencyRefusalParams params) {
  auto& shared = *reinterpret_cast<RefusalShared*>(dynamic_shared());
  const LatencyParams& call = params.call;
  if (warp_idx() == 0) {
    const std::uint64_t number = turn_number(call, params.kind);
    grant_owed_set(call, params.kind, number);
    send_refusal(params, number, own_set(call, params.kind, number), shared);
    __syncwarp();
    if (shared.number != 0 && load_num_absent(call) != 0) post_for_absent(call, params.kind, number, shared.set, 0);
  }
  __syncthreads();
  const bool free = receive_refusal(params, shared);
  if (free && warp_idx() == 0) grant_set(call, params.kind, shared.number, shared.set);
}

// Groups that mask ranks (mask.hpp) refuse in two halves, with a gate between them.

using MaskedParams = Masked<LatencyRefusalParams>;
constexpr std::size_t kOwnBytes = own_params_bytes<LatencyRefusalParams>(true);

__device__ RefusalShared& refusal_shared() { return *reinterpret_cast<RefusalShared*>(dynamic_shared() + kOwnBytes); }

__global__ void __launch_bounds__(kRefusalThreads) refusal_send_kernel(const __grid_constant__ MaskedParams params) {
  RefusalShared& shared = refusal_shared();
  const std::uint64_t number = turn_number(params.call, params.kind);
  {
    const MaskedParams& own = copy_without_masked(params, dynamic_shared());
    if (warp_idx() == 0) {
      const int set = own_set(own.call, own.kind, number);
      if (lane_idx() == 0) shared.set = set;
    }
  }
  __syncthreads();
  wait_for_grants(params.call, params.mask, params.kind, number);
  __syncthreads();
  // Copied once more, since ranks may have been masked during the wait.
  MaskedParams& own = own_send_params(params, dynamic_shared(), params.kind);
  if (warp_idx() != 0) return;
  send_refusal(own, number, shared.set, shared);
  if (lane_idx() != 0) return;
  params.mask.state->refused[static_cast<int>(params.kind)] = {shared.number, static_cast<std::uint32_t>(shared.set),
                                                               shared.number != 0 ? 1U : 0U, 0};
}

__global__ void __launch_bounds__(kRefusalThreads) refusal_receive_kernel(const __grid_constant__ MaskedParams params) {
  RefusalShared& shared = refusal_shared();
  MaskedParams& own = own_receive_params(params, dynamic_shared());
  SentCall& refused = params.mask.state->refused[static_cast<int>(params.kind)];
  if (threadIdx.x == 0) {
    shared.number = refused.pending != 0 ? refused.number : 0;
    shared.set = static_cast<int>(refused.set);
    refused.pending = 0;
  }
  __syncthreads();
  if (!receive_refusal(own, shared)) return;
  look_at_window(params, own);
  if (warp_idx() == 0) grant_set(own.call, params.kind, shared.number, shared.set);
}

std::size_t shared_bytes(const LatencyRefusalParams& /*params*/) { return sizeof(RefusalShared); }
std::size_t masked_shared_bytes(const MaskedParams& /*params*/) { return kOwnBytes + sizeof(RefusalShared); }

constexpr KernelRow<LatencyRefusalParams> kWhole = {{refusal_kernel}, kRefusalThreads, shared_bytes};
constexpr KernelRow<MaskedParams> kMaskedSend = {{refusal_send_kernel}, kRefusalThreads, masked_shared_bytes};
constexpr KernelRow<MaskedParams> kMaskedReceive = {{refusal_receive_kernel}, kRefusalThreads, masked_shared_bytes};

}  // namespace

cudaError_t launch_latency_refusal(const LatencyRefusalParams& params, const MaskParams& mask, cudaStream_t stream) {
  if (!mask.present()) return kWhole.launch(0, 1, false, params, stream);
  const MaskedParams masked{params, mask};
  cudaError_t error = kMaskedSend.launch(0, 1, false, masked, stream);
  if (error == cudaSuccess) error = launch_arrivals_gate({params.call, mask, params.kind, {}, true}, stream);
  if (error == cudaSuccess) error = kMaskedReceive.launch(0, 1, false, masked, stream);
  return error;
}

cudaError_t load_latency_refusal(bool masks) {
  const cudaError_t error = kWhole.load();
  return error == cudaSuccess && masks ? load_rows(kMaskedSend, kMaskedReceive) : error;
}

cudaError_t load_latency_kernels(bool masks) {
  cudaError_t error = load_latency_dispatch(masks);
  if (error == cudaSuccess) error = load_latency_combine(masks);
  if (error == cudaSuccess) error = load_tiles_gate();
  if (error == cudaSuccess) error = load_latency_refusal(masks);
  return error == cudaSuccess && masks ? load_masks() : error;
}

}  // namespace ferry::cuda
