#ifndef FERRY_CUDA_LATENCY_REFUSAL_CUH
#define FERRY_CUDA_LATENCY_REFUSAL_CUH

/// The halves of a call that this rank refuses, by one block.

#include "cuda/latency/words.cuh"

namespace ferry::cuda::device {

inline constexpr int kRefusalThreads = 256;

/// In dynamic shared memory.
struct RefusalShared {
  std::uint64_t number;  ///< 0: the group broke
  int set;
  int sets[kMaxRanks];
  int num_blocks[kMaxRanks];
};

/// The set of this call on this rank: the one that it has granted, or else kNoSet, which it grants now. All lanes of
/// one warp.
__device__ inline int own_set(const LatencyRefusalParams& params, std::uint64_t number) {
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

/// Tells every rank. All lanes of one warp.
__device__ inline void send_refusal(const LatencyRefusalParams& params, std::uint64_t number, int set,
                                    RefusalShared& shared) {
  const LatencyParams& call = params.call;
  LatencyHeader header;
  header.record_number = call.record_number;
  const TurnLook turn(call, params.kind);
  const bool whole = wait_grants(call, params.kind, turn, GrantsLook(call, params.kind), shared.sets);
  if (whole) post_header(call, params.kind, number, header, shared.sets);
  if (lane_idx() != 0) return;
  count_turn(call, params.kind, number);
  shared.number = whole ? number : 0;
  shared.set = set;
}

/// Combine's rows come to one place from all ranks, so none may be on its way when the set is granted again.
__device__ inline bool wait_senders(const LatencyParams& call, std::uint64_t number, int set, const int* num_blocks) {
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
__device__ inline bool receive_refusal(const LatencyRefusalParams& params, RefusalShared& shared) {
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

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_REFUSAL_CUH
