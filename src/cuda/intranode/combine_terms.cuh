#ifndef FERRY_CUDA_INTRANODE_COMBINE_TERMS_CUH
#define FERRY_CUDA_INTRANODE_COMBINE_TERMS_CUH

/// Terms of a token's sum: its biases and its rows, in the order that the contract prescribes, each with its weights.

#include "cuda/copy/prefetch.cuh"
#include "cuda/intranode/combine_params.hpp"
#include "cuda/numeric/row_sum.cuh"
#include "cuda/sync/entry.cuh"
#include "cuda/sync/staged.cuh"

namespace ferry::cuda::device {

/// Location of a rank's rows as this rank sees it. In shared memory, one per rank.
struct Holder {
  const std::byte* rows;
  std::int64_t row_stride;
  const float* weights;
  std::int64_t num_stagers;  ///< number of blocks that stage the rows; 0: the rows need no staging
};

/// Holder described by a rank's entry. `kStagesOwn`: this rank too reads its rows from staging.
template <bool kStagesOwn>
__device__ inline Holder holder_of(const CombineParams& params, int rank, const ReceivedEntry& entry) {
  const RankParams& ranks = params.ranks;
  const std::byte* base = ranks.peer_bases[rank];
  const bool self = !kStagesOwn && rank == ranks.rank;
  const std::int64_t rows_offset = entry.rows_offset();
  const std::int64_t rows_stride = entry.rows_stride();
  const std::int64_t flags = entry.flags();
  return {self ? params.x : base + rows_offset, self ? params.x_stride : rows_stride,
          reinterpret_cast<const float*>(base + entry.tables_offset()),
          !self && (flags & kRowsStaged) != 0 ? flags >> kStagersShift : 0};
}

/// A lane's entry of a token: its destination, if it has one, and its weight.
struct TokenEntry {
  Destination destination;
  float weight = 1.0F;
};

/// Entries of all lanes as they land in a warp's shared memory. Entries loaded into registers ahead of their use would
/// be awaited at once, because the compiler extracts a destination's fields right after the load.
struct alignas(16) FetchedEntries {
  uint4 destinations[kWarpLanes];
  float weights[kWarpLanes];
};

/// Finds the terms of tokens. Used by one warp.
class TermFinder {
 public:
  /// `known_staged`: [R], shared by the block, 0 when the block has received the entries.
  __device__ TermFinder(const CombineParams& params, const Holder* holders, std::uint32_t* known_staged,
                        std::uint64_t epoch)
      : params_(params), holders_(holders), known_staged_(known_staged), epoch_(epoch) {}

  __device__ TokenEntry load_entry(std::int64_t token) const {
    TokenEntry entry{none(), 1.0F};
    if (lane_idx() >= params_.num_topk) return entry;
    const std::int64_t at = token * params_.num_topk + lane_idx();
    const uint4 raw = reinterpret_cast<const uint4*>(params_.destinations)[at];
    entry.destination = *reinterpret_cast<const Destination*>(&raw);
    if (params_.weighted) entry.weight = params_.topk_weights[at];
    return entry;
  }

  /// Starts to load the entries of `token`. The entries that landed before have been used.
  __device__ void fetch_entries(std::int64_t token, FetchedEntries& to) const {
    if (lane_idx() >= params_.num_topk) return;
    const std::int64_t at = token * params_.num_topk + lane_idx();
    start_fetch<sizeof(uint4)>(to.destinations + lane_idx(), params_.destinations + at);
    if (params_.weighted) start_fetch<sizeof(float)>(to.weights + lane_idx(), params_.topk_weights + at);
  }

  /// Waits for the fetched entries and returns this lane's.
  __device__ TokenEntry fetched_entry(const FetchedEntries& from) const {
    wait_fetches();
    if (lane_idx() >= params_.num_topk) return {none(), 1.0F};
    const uint4 raw = from.destinations[lane_idx()];
    return {*reinterpret_cast<const Destination*>(&raw), params_.weighted ? from.weights[lane_idx()] : 1.0F};
  }

  /// Waits until the rows of `token` can be read, fills `terms` and returns the number of rows; -1 if the group broke.
  /// All lanes call it.
  __device__ int find(std::int64_t token, const TokenEntry& entry, Terms& terms) {
    if (!await_rows(entry.destination)) return -1;
    return collect_terms(token, entry, terms);
  }

 private:
  __device__ static Destination none() {
    Destination destination{};
    destination.rank = -1;
    return destination;
  }

  /// Waits until this rank can read the rows of all destinations.
  __device__ bool await_rows(const Destination& destination) {
    const auto rank = static_cast<int>(destination.rank);
    std::uint32_t needed = 0;
    if (rank >= 0 && holders_[rank].num_stagers != 0) {
      // Rows grouped by expert: a row may be anywhere.
      needed = params_.one_row_per_token
                   ? static_cast<std::uint32_t>(destination.token_row - params_.rank_base[rank]) + 1
                   : kAllStaged;
    }
    // Most tokens need only rows that are already known to be staged.
    const std::uint32_t known = __shfl_sync(0xFFFFFFFFU, known_rows_, rank & (kWarpLanes - 1));
    const bool kept = params_.ranks.num_ranks <= kWarpLanes;
    if (__all_sync(0xFFFFFFFFU, static_cast<int>(needed == 0 || (kept && needed <= known))) != 0) return true;
    AwaitedRows rows;
    if (needed != 0) rows = {rank, static_cast<int>(holders_[rank].num_stagers), needed};
    if (!await_staged(params_.ranks, rows, epoch_, known_staged_)) return false;
    if (lane_idx() < params_.ranks.num_ranks) known_rows_ = load_acquire_block(known_staged_ + lane_idx());
    __syncwarp();  // passes the data that each lane acquired to all lanes
    fence_async_proxy();
    return true;
  }

  /// Fills `terms`; returns the number of rows.
  __device__ int collect_terms(std::int64_t token, const TokenEntry& entry, Terms& terms) const {
    const Destination& destination = entry.destination;
    int num_rows = 0;
    for (const BiasRows& bias : params_.bias) {
      if (bias.data == nullptr) continue;
      if (lane_idx() == 0) {
        terms.rows[num_rows] = bias.data + token * bias.stride;
        terms.first_weight[num_rows] = static_cast<std::uint8_t>(num_rows);
        terms.weights[num_rows] = 1.0F;  // fma(1, b, acc) is acc + b
      }
      ++num_rows;
    }
    const bool first = destination.rank >= 0 && (destination.flags & kFirstOfRow) != 0;
    const bool counts = params_.weighted ? destination.rank >= 0 : first;
    const unsigned rows = __ballot_sync(0xFFFFFFFFU, first);
    const unsigned weights = __ballot_sync(0xFFFFFFFFU, counts);
    const unsigned below = (1U << lane_idx()) - 1U;
    const int weight_idx = num_rows + __popc(weights & below);
    if (first) {
      const Holder& holder = holders_[destination.rank];
      const int row_idx = num_rows + __popc(rows & below);
      terms.rows[row_idx] = holder.rows + destination.row * holder.row_stride;
      terms.first_weight[row_idx] = static_cast<std::uint8_t>(weight_idx);
    }
    const float weight = __shfl_sync(0xFFFFFFFFU, entry.weight, static_cast<int>(destination.topk));
    if (counts) terms.weights[weight_idx] = weight;
    if (lane_idx() == 0) {
      terms.first_weight[num_rows + __popc(rows)] = static_cast<std::uint8_t>(num_rows + __popc(weights));
      terms.num_weights = num_rows + __popc(weights);
    }
    __syncwarp();
    return num_rows + __popc(rows);
  }

  const CombineParams& params_;
  const Holder* holders_;
  std::uint32_t* known_staged_;
  std::uint64_t epoch_;
  std::uint32_t known_rows_ = 0;  // rows known to be staged by the rank whose number is this lane's
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_COMBINE_TERMS_CUH
