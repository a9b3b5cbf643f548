#ifndef FERRY_CUDA_INTERNODE_SUM_TURNS_CUH
#define FERRY_CUDA_INTERNODE_SUM_TURNS_CUH

/// The order in which a combine sums the items that a rank forwards. Turn i is that of warp i modulo the number of
/// warps. First come the items of other nodes, one for each node in turn, so that all rings have something to send from
/// the beginning; then those of the own node, which no network waits for. Warps publish how many of their turns are
/// done (RailState::summed), and the blocks that fill a ring wait for those that they need.

#include "cuda/internode/exchange_params.hpp"
#include "cuda/sync/rank_sync.cuh"

namespace ferry::cuda::device {

class SumTurns {
 public:
  /// `to_nodes`: of dispatch, [nodes]. All lanes of a warp.
  __device__ SumTurns(const RailParams& rails, const ItemFlow* to_nodes) : rails_(rails), to_nodes_(to_nodes) {
    for (int node = 0; node < rails.num_nodes; ++node) {
      const int num_in = to_nodes[node].num_in;
      if (node != rails.node && num_in > most_in_) most_in_ = num_in;
    }
  }

  /// Turns of other nodes' items, some of which may have none.
  __device__ std::int64_t num_for_peers() const { return std::int64_t{most_in_} * (rails_.num_nodes - 1); }
  __device__ std::int64_t num_turns() const { return num_for_peers() + to_nodes_[rails_.node].num_out; }

  /// The item whose turn it is; -1: none.
  __device__ std::int64_t item_of(std::int64_t turn) const {
    const std::int64_t num_peers = rails_.num_nodes - 1;
    if (turn >= num_for_peers()) return to_nodes_[rails_.node].first_in + (turn - num_for_peers());
    const auto peer = static_cast<int>((rails_.node + 1 + turn % num_peers) % rails_.num_nodes);
    const ItemFlow& flow = to_nodes_[peer];
    const std::int64_t idx = turn / num_peers;
    return idx < flow.num_in ? flow.first_in + idx : -1;
  }

  /// The turn of item `idx` of those that go to another node.
  __device__ static std::int64_t turn_of(const RailParams& rails, int peer, std::int64_t idx) {
    return idx * (rails.num_nodes - 1) + (peer - rails.node - 1 + rails.num_nodes) % rails.num_nodes;
  }

 private:
  const RailParams& rails_;
  const ItemFlow* to_nodes_;
  std::int32_t most_in_ = 0;
};

/// What one warp publishes of its turns; all lanes of it.
class SumReport {
 public:
  /// `row_bytes`: short sums are published several at a time.
  __device__ SumReport(const RailParams& rails, int warp, std::int64_t row_bytes)
      : word_(&rails.state->summed[warp]),
        tag_(half_of(*static_cast<const volatile std::uint64_t*>(&rails.state->exchange) + 1) << 32),
        interval_(row_bytes < kReportBytes ? static_cast<std::uint32_t>(kReportBytes / row_bytes) : 1) {}

  /// One more turn is done; `last`: of this warp.
  __device__ void add(bool last) {
    ++num_done_;
    if (num_done_ % interval_ != 0 && !last) return;
    __syncwarp();  // one release covers what all lanes have written
    if (lane_idx() == 0) store_release_device(word_, tag_ | num_done_);
  }

 private:
  static constexpr std::int64_t kReportBytes = 4096;

  std::uint64_t* word_;
  std::uint64_t tag_;
  std::uint32_t interval_;
  std::uint32_t num_done_ = 0;
};

/// Waits until sums [first, first + num) of those that go to a peer are there; false when the group broke. All threads
/// of the block.
__device__ __noinline__ inline bool await_sums(const ExchangeParams& params, int peer, std::int64_t first,
                                               std::int64_t num, std::uint64_t exchange) {
  const std::int64_t num_warps = params.num_sum_warps;
  const std::int64_t end = first + num;
  // Warps take their turns in order, and equal warps come back after so many items at most.
  const std::int64_t begin = num > num_warps ? end - num_warps : first;
  bool here = true;
  for (std::int64_t idx = begin + threadIdx.x; idx < end; idx += blockDim.x) {
    const std::int64_t turn = SumTurns::turn_of(params.rails, peer, idx);
    const std::uint64_t* word = &params.rails.state->summed[turn % num_warps];
    const auto read = [word, exchange] {
      const std::uint64_t done = load_acquire_device(word);
      return done >> 32 == half_of(exchange) ? half_of(done) : 0;
    };
    const auto wanted = static_cast<std::uint64_t>(turn / num_warps + 1);
    here = wait_until(params.ranks, {Awaited::kOwn, params.ranks.rank, exchange}, read, wanted) && here;
  }
  return __syncthreads_and(static_cast<int>(here)) != 0;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTERNODE_SUM_TURNS_CUH
