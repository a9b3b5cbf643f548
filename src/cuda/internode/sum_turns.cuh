#ifndef FERRY_CUDA_INTERNODE_SUM_TURNS_CUH
#define FERRY_CUDA_INTERNODE_SUM_TURNS_CUH

/// Order in which a combine sums the items that a rank forwards. Turn i belongs to warp i modulo the number of warps.
/// Items of other nodes are first, one for each node in turn, so that every ring can send from the beginning; items of
/// this node follow, since no network waits for them. Warps publish the number of their completed turns
/// (RailState::summed); blocks that fill a ring, and those that add up tokens, wait for the turns that they need.

#include "cuda/internode/exchange_params.hpp"
#include "cuda/sync/rank_sync.cuh"

namespace ferry::cuda::device {

class SumTurns {
 public:
  /// `to_nodes`: [nodes] flows of dispatch. All lanes of a warp call it.
  __device__ SumTurns(const RailParams& rails, const ItemFlow* to_nodes) : rails_(rails), to_nodes_(to_nodes) {
    for (int node = 0; node < rails.num_nodes; ++node) {
      const int num_in = to_nodes[node].num_in;
      if (node != rails.node && num_in > most_in_) most_in_ = num_in;
    }
  }

  /// Number of turns for other nodes' items; some turns have no item.
  __device__ std::int64_t num_for_peers() const { return std::int64_t{most_in_} * (rails_.num_nodes - 1); }
  __device__ std::int64_t num_turns() const { return num_for_peers() + to_nodes_[rails_.node].num_out; }

  /// Item of a turn; -1: none.
  __device__ std::int64_t item_of(std::int64_t turn) const {
    const std::int64_t num_peers = rails_.num_nodes - 1;
    if (turn >= num_for_peers()) return to_nodes_[rails_.node].first_in + (turn - num_for_peers());
    const auto peer = static_cast<int>((rails_.node + 1 + turn % num_peers) % rails_.num_nodes);
    const ItemFlow& flow = to_nodes_[peer];
    const std::int64_t idx = turn / num_peers;
    return idx < flow.num_in ? flow.first_in + idx : -1;
  }

  /// Turn of item `idx` among the items for another node.
  __device__ static std::int64_t turn_of(const RailParams& rails, int peer, std::int64_t idx) {
    return idx * (rails.num_nodes - 1) + (peer - rails.node - 1 + rails.num_nodes) % rails.num_nodes;
  }

 private:
  const RailParams& rails_;
  const ItemFlow* to_nodes_;
  std::int32_t most_in_ = 0;
};

/// Publishes the completed turns of one warp. All of its lanes call it.
class SumReport {
 public:
  /// `row_bytes`: short sums are published several at a time.
  __device__ SumReport(const RailParams& rails, std::uint64_t exchange, int warp, std::int64_t row_bytes)
      : word_(&rails.state->summed[warp]),
        tag_(half_of(exchange) << 32),
        interval_(row_bytes < kReportBytes ? static_cast<std::uint32_t>(kReportBytes / row_bytes) : 1) {}

  /// Counts one more completed turn; `last`: it is the warp's last one.
  __device__ void add(bool last) {
    ++num_done_;
    if (num_done_ % interval_ != 0 && !last) return;
    __syncwarp();  // one release covers the writes of all lanes
    if (lane_idx() == 0) store_release_device(word_, tag_ | num_done_);
  }

  /// Publishes all of the warp's turns as completed, though it makes no sums: for chunks that the peers will drop.
  __device__ void give_up() const {
    if (lane_idx() == 0) store_release_device(word_, tag_ | half_of(~std::uint64_t{0}));
  }

 private:
  static constexpr std::int64_t kReportBytes = 4096;

  std::uint64_t* word_;
  std::uint64_t tag_;
  std::uint32_t interval_;
  std::uint32_t num_done_ = 0;
};

/// Waits until a turn is complete; false if the group broke. One thread.
__device__ inline bool await_turn(const ExchangeParams& params, std::int64_t turn, std::uint64_t exchange) {
  const std::int64_t num_warps = params.num_sum_warps();
  const std::uint64_t* word = &params.rails.state->summed[turn % num_warps];
  const auto read = [word, exchange] {
    const std::uint64_t done = load_acquire_device(word);
    return done >> 32 == half_of(exchange) ? half_of(done) : 0;
  };
  const auto wanted = static_cast<std::uint64_t>(turn / num_warps + 1);
  return wait_until(params.ranks, {Awaited::kOwn, params.ranks.rank, exchange}, read, wanted);
}

/// Waits until sums [first, first + num) of those for a peer are complete; false if the group broke. All threads of the
/// block call it.
__device__ __noinline__ inline bool await_sums(const ExchangeParams& params, int peer, std::int64_t first,
                                               std::int64_t num, std::uint64_t exchange) {
  const std::int64_t num_warps = params.num_sum_warps();
  const std::int64_t end = first + num;
  // Warps take their turns in order, and each warp recurs after at most num_warps items.
  const std::int64_t begin = num > num_warps ? end - num_warps : first;
  bool here = true;
  for (std::int64_t idx = begin + threadIdx.x; idx < end; idx += blockDim.x) {
    here = await_turn(params, SumTurns::turn_of(params.rails, peer, idx), exchange) && here;
  }
  return __syncthreads_and(static_cast<int>(here)) != 0;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTERNODE_SUM_TURNS_CUH
