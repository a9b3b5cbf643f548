#ifndef FERRY_CUDA_INTERNODE_ARRIVALS_CUH
#define FERRY_CUDA_INTERNODE_ARRIVALS_CUH

/// Rows that ranks take from the node's staging while the network still fills it: ranks publish the number of items
/// that have arrived from each node (RailLog::Arrivals), and warps take rows in the order in which items arrive.

#include "cuda/internode/exchange_params.hpp"
#include "cuda/internode/pull.cuh"
#include "cuda/sync/rank_sync.cuh"

namespace ferry::cuda::device {

/// Number of items that have arrived, in the published form.
__device__ inline std::uint64_t arrival_count(std::uint64_t epoch, std::int64_t num_items) {
  return half_of(epoch) << 32 | static_cast<std::uint64_t>(num_items);
}

/// Variant of wait_until whose deadline restarts whenever `read()` grows. Returns the last value, which is less than
/// `expected` if the group broke.
template <typename Read, typename Count = NoCount>
__device__ inline std::uint64_t wait_while_growing(const RankParams& ranks, const Wait& wait, Read read,
                                                   std::uint64_t expected, Count count = {}) {
  const bool own = wait.awaited == Awaited::kOwn;
  std::uint64_t last = 0;
  std::uint64_t moved_ns = 0;
  bool stopped = false;
  for (unsigned spin = 0;; ++spin) {
    const std::uint64_t seen = read();
    if (seen >= expected) return seen;
    if (stopped) {
      declare_lost(ranks, wait, {seen, expected, true});
      return seen;
    }
    if (spin % kSpinsPerCheck != 0) continue;
    if (is_broken(ranks)) return seen;
    const std::uint64_t now = now_ns();
    if (moved_ns == 0 || seen != last) moved_ns = now;
    last = seen;
    if (now - moved_ns >= ranks.timeout_ns * (own ? kOwnDeadlines : 1)) {
      declare_lost(ranks, wait, {seen, expected, false});
      return seen;
    }
    count.looked(moved_ns, now);
    if (own || spin == 0 || spin % kSpinsPerStopCheck != 0) continue;
    show_wait(ranks, wait.awaited, wait.peer, now);
    stopped = is_stopped(ranks);  // the value is read once more after this
  }
}

/// Publishes to the ranks of the node which items will arrive. All threads of one block call it; the counts follow
/// later.
__device__ inline void publish_flows(const ExchangeParams& params, std::uint64_t epoch) {
  const auto node = static_cast<int>(threadIdx.x);
  RailLog& log = *params.rails.log;
  if (node < params.rails.num_nodes) {
    const ItemFlow& flow = params.flows[node];
    log.arrivals[node].first = flow.first_in;
    log.arrivals[node].num = node == params.rails.node ? flow.num_out : flow.num_in;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  fence_system();
  store_release_system(&log.known, epoch);
}

/// A rank of the node: its staging and its log. In shared memory.
struct PullSource {
  PullHolder staging;
  const RailLog* log;
};

/// Items from one node in one rank's staging.
struct PullFlow {
  std::int32_t first;
  std::int32_t num;
  std::uint32_t num_seen;  ///< items that some warp has seen arrive; st.release.cta / ld.acquire.cta
};

/// The block's view of the node, shared by all warps.
class PullView {
 public:
  __device__ PullView(const ExchangeParams& params, std::byte* memory, std::uint64_t epoch)
      : params_(params),
        sources_(reinterpret_cast<PullSource*>(memory)),
        flows_(reinterpret_cast<PullFlow*>(sources_ + params.ranks.num_ranks)),
        held_(reinterpret_cast<std::uint32_t*>(flows_ + params.ranks.num_ranks * params.rails.num_nodes)),
        epoch_(epoch) {}
  static std::size_t size_bytes(int num_warps, int num_ranks, int num_nodes) {
    return static_cast<std::size_t>(num_ranks) *
               (sizeof(PullSource) + static_cast<std::size_t>(num_nodes) * sizeof(PullFlow)) +
           static_cast<std::size_t>(num_warps) * kHeldWords * sizeof(std::uint32_t);
  }

  __device__ void set(int rank, const PullSource& source) { sources_[rank] = source; }

  /// Waits until all ranks have published which items will arrive; false if the group broke. All threads of the block
  /// call it.
  __device__ bool open() {
    __syncthreads();
    const int num_flows = params_.ranks.num_ranks * params_.rails.num_nodes;
    bool here = true;
    for (int i = static_cast<int>(threadIdx.x); i < num_flows; i += static_cast<int>(blockDim.x)) {
      const int rank = i / params_.rails.num_nodes;
      const RailLog& log = *sources_[rank].log;
      const StepCount count(params_.ranks, rank);
      here = wait_flag(params_.ranks, {Awaited::kEntry, rank, epoch_}, &log.known, epoch_, count) && here;
      const volatile RailLog::Arrivals& arrivals = log.arrivals[i % params_.rails.num_nodes];
      if (here) flows_[i] = {arrivals.first, arrivals.num, 0};
    }
    return __syncthreads_and(static_cast<int>(here)) != 0;
  }

  /// Waits until an item is in a rank's staging; false if the group broke. All lanes of a warp call it.
  __device__ bool wait_item(int rank, std::int32_t item) const {
    bool here = true;
    if (lane_idx() < params_.rails.num_nodes) {
      PullFlow& flow = flows_[rank * params_.rails.num_nodes + lane_idx()];
      const std::int32_t wanted = item - flow.first + 1;
      if (wanted > 0 && wanted <= flow.num && load_acquire_block(&flow.num_seen) < static_cast<std::uint32_t>(wanted)) {
        here = wait_count(rank, wanted, flow);
      }
    }
    here = __all_sync(kAllLanes, static_cast<int>(here)) != 0;
    __syncwarp();  // passes the data that one lane acquired to all lanes
    return here;
  }

  __device__ const PullHolder& staging(int rank) const { return sources_[rank].staging; }
  /// Memory of this warp for pull_row().
  __device__ std::uint32_t* held() const { return held_ + warp_idx() * kHeldWords; }

 private:
  __device__ __noinline__ bool wait_count(int rank, std::int32_t wanted, PullFlow& flow) const {
    const std::uint64_t* word = &sources_[rank].log->arrivals[lane_idx()].count;
    const auto read = [word, epoch = epoch_] {
      const std::uint64_t count = load_acquire_system(word);
      return count >> 32 == half_of(epoch) ? half_of(count) : 0;
    };
    const Wait wait{Awaited::kRows, rank, epoch_};
    const auto expected = static_cast<std::uint64_t>(wanted);
    const std::uint64_t seen = wait_while_growing(params_.ranks, wait, read, expected, StepCount(params_.ranks, rank));
    if (seen < expected) return false;
    store_release_block(&flow.num_seen, static_cast<std::uint32_t>(seen));
    return true;
  }

  const ExchangeParams& params_;
  PullSource* sources_;
  PullFlow* flows_;
  std::uint32_t* held_;
  std::uint64_t epoch_;
};

/// Takes rows until none is left, one warp per row. Rows of one source, or of one expert and source, are contiguous and
/// arrive one after another; rows of different sources arrive at the same time. Warps therefore take one row of each in
/// turn, and look for the next row while they copy one.
__device__ inline void pull_arriving_rows(const ExchangeParams& params, const PullView& view) {
  const PullParams& pull = params.pull;
  const std::int64_t num_runs = pull.row_experts == nullptr ? pull.num_sources : pull.num_experts;
  const std::int64_t run_rows = (pull.num_rows + num_runs - 1) / num_runs;
  const std::int64_t num_turns = num_runs * run_rows;
  std::uint32_t* const num_taken = &params.rails.state->num_taken;
  const auto take_turn = [num_taken] { return lane_idx() == 0 ? atomicAdd(num_taken, 1U) : 0U; };
  const auto row_of = [num_runs, run_rows](std::int64_t turn) { return turn % num_runs * run_rows + turn / num_runs; };
  const auto item_of = [&pull, &row_of, num_turns](std::int64_t turn) {
    const std::int64_t row = row_of(turn);
    return turn < num_turns && row < pull.num_rows ? pull.row_items[row] : RowItem{-1, 0};
  };
  std::uint32_t turn = __shfl_sync(kAllLanes, take_turn(), 0);
  RowItem from = item_of(turn);
  std::uint32_t taken = take_turn();
#pragma unroll 1
  while (turn < num_turns) {
    const std::uint32_t next = __shfl_sync(kAllLanes, taken, 0);
    const RowItem next_from = item_of(next);
    taken = take_turn();
    if (from.forwarder >= 0) {
      if (!view.wait_item(from.forwarder, from.item)) return;
      pull_row(pull, view.staging(from.forwarder), row_of(turn), from.item, view.held());
    }
    turn = next;
    from = next_from;
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTERNODE_ARRIVALS_CUH
