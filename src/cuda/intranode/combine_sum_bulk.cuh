#ifndef FERRY_CUDA_INTRANODE_COMBINE_SUM_BULK_CUH
#define FERRY_CUDA_INTRANODE_COMBINE_SUM_BULK_CUH

/// Summing by the bulk copy engine: some of a warp's rows land in shared memory while the warp adds others. A few
/// multiprocessors then keep enough bytes in flight to fill the links, if adding keeps up.

#include "cuda/intranode/combine_sets.cuh"
#include "cuda/intranode/combine_weights.cuh"
#include "cuda/sync/claim.cuh"

namespace ferry::cuda::device {

/// One warp's shared memory.
struct SumStages {
  std::byte* sets;  ///< [kSumSets, kSetBytes]
  std::uint64_t* barriers;
  Terms* terms;  ///< [kSumTokens]
  FetchedEntries* entries;
};

/// `Rows`: the format of the rows.
template <typename Rows>
class BulkSummer {
 public:
  /// A warp's first two items follow from its number, `first` of `step` warps; it claims the others.
  __device__ BulkSummer(const CombineParams& params, TermFinder& finder, ReturnedWeights& weights,
                        const SumStages& stages, int first, int step)
      : params_(params),
        finder_(finder),
        weights_(weights),
        stages_(stages),
        items_(SumItems::of(params, step)),
        next_item_(first),
        claim_(first - step),
        num_given_(2 * step) {
    fetch_entries();
  }

  __device__ void run() {
    // Every turn except the first ones adds a set. The first turns number one more than the sets: the very first turn
    // only finds the item that the others load.
    constexpr int kFirstTurn = -1 - kSumSets;
#pragma unroll 1
    for (int turn = kFirstTurn; turn < 0 || next_to_add(); ++turn) {
      const auto set = static_cast<int>(static_cast<unsigned>(turn) % kSumSets);
      if (turn >= 0) add(set);
      load(set);
    }
    wait_fetches();
    weights_.sum();
  }

  /// Ends the fetches of the constructor when the call sums nothing.
  __device__ void drop() const { wait_fetches(); }

 private:
  using Cursor = typename Rows::Cursor;

  /// Starts to fetch the entries of the next item. Every lane has used the previous ones.
  __device__ void fetch_entries() const {
    if (next_item_ < items_.num) finder_.fetch_entries(items_.at(next_item_).token, *stages_.entries);
  }

  /// Starts to load the next set, or finds the first item. All lanes call it.
  __device__ void load(int set) {
    if (!loading_.ended()) {
      const Terms& terms = stages_.terms[loading_terms_];
      std::uint64_t* barrier = stages_.barriers + set;
      const std::uint32_t bytes = loading_.bytes(params_);
      if (lane_idx() == 0) expect_loads(barrier, bytes * static_cast<std::uint32_t>(terms.num_rows));
      __syncwarp();
#pragma unroll 1
      for (int row = lane_idx(); row < terms.num_rows; row += kWarpLanes) {
        loading_.load(stages_.sets + set * kSetBytes, row, terms.rows[row], bytes, barrier);
      }
      ++loading_.piece;
    }
    if (loading_.ended()) begin_item();
  }

  /// Finds the next item's terms. All lanes call it.
  __device__ void begin_item() {
    if (next_item_ >= items_.num) return;
    const SumItems::Item item = items_.at(next_item_);
    // Entries are fetched and items are claimed ahead of their use, so that no lane waits for them.
    const TokenEntry entry = finder_.fetched_entry(*stages_.entries);
    weights_.sum();
    next_item_ = num_given_ + __shfl_sync(0xFFFFFFFFU, claim_, 0);
    if (lane_idx() == 0 && next_item_ < items_.num) {
      claim_ = static_cast<int>(claim(&params_.ranks.control.local->num_items_claimed));
    }
    loading_terms_ = loading_terms_ + 1 == kSumTokens ? 0 : loading_terms_ + 1;
    Terms& terms = stages_.terms[loading_terms_];
    const int num_rows = finder_.find(item.token, entry, terms);
    if (num_rows < 0) {
      next_item_ = items_.num;
      return;
    }
    fetch_entries();
    if (item.part == 0) weights_.fetch(item.token, entry.destination);
    if (lane_idx() == 0) {
      terms.num_rows = num_rows;
      terms.token = item.token;
      terms.part = item.part;
    }
    __syncwarp();
    loading_ = Cursor::of(item, num_rows, params_);
    ++num_found_;
  }

  /// Whether any set remains to be added.
  __device__ bool next_to_add() {
    if (!using_.ended()) return true;
    if (num_found_ == 0) return false;
    --num_found_;
    using_terms_ = using_terms_ + 1 == kSumTokens ? 0 : using_terms_ + 1;
    const Terms& terms = stages_.terms[using_terms_];
    const int parts_log2 = terms.token < items_.num_whole ? 0 : items_.parts_log2;
    using_ = Cursor::of({terms.token, terms.part, parts_log2}, terms.num_rows, params_);
    return true;
  }

  /// Adds a set and writes the sum. All lanes call it.
  __device__ void add(int set) {
    wait_barrier(stages_.barriers + set, parities_ >> set & 1U);
    parities_ ^= 1U << set;
    Rows::add(params_, stages_.terms[using_terms_], using_, shared_address(stages_.sets) + set * kSetBytes);
    __syncwarp();
    ++using_.piece;
  }

  const CombineParams& params_;
  TermFinder& finder_;
  ReturnedWeights& weights_;
  SumStages stages_;
  SumItems items_;
  int next_item_;
  int claim_;  // lane 0: claimed number of the item after next_item_, counted from num_given_
  int num_given_;
  Cursor loading_;
  Cursor using_;
  int loading_terms_ = 0;
  int using_terms_ = 0;
  int num_found_ = 0;  // items found but not yet begun to be added
  std::uint32_t parities_ = 0;
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_COMBINE_SUM_BULK_CUH
