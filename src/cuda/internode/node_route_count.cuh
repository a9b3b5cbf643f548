#ifndef FERRY_CUDA_INTERNODE_NODE_ROUTE_COUNT_CUH
#define FERRY_CUDA_INTERNODE_NODE_ROUTE_COUNT_CUH

/// Reads the ids of all tokens and numbers the tokens of each destination, in their order. A block looks twice at the
/// tokens of a source: its warps count those of each destination in a range each, and number them once the warps before
/// them have counted theirs.

#include <cstdint>

#include "cuda/call/token_lanes.cuh"
#include "cuda/internode/node_route_params.hpp"
#include "cuda/sync/rank_sync.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda::device {

/// As many warps as a block can have: calls over nodes get few multiprocessors (kMostCallSms in steps.hpp), and these
/// kernels spend their time waiting for memory.
inline constexpr int kCountWarps = 32;

/// Ids of one rank, as every rank received them.
struct RankIds {
  const IdsHeader* header;
  const std::int32_t* ids;  ///< [max_tokens, K]

  __device__ RankIds(const NodeRouteParams& params, int rank)
      : header(reinterpret_cast<const IdsHeader*>(params.all + rank * params.blocks.block_bytes())),
        ids(reinterpret_cast<const std::int32_t*>(header + 1)) {}

  /// Number of the rank's tokens, clamped to this rank's memory because it comes from another rank.
  __device__ std::int64_t num_tokens(const NodeRouteParams& params) const {
    const std::int64_t num = header->num_tokens;
    return num < 0 ? 0 : num < params.blocks.max_tokens ? num : params.blocks.max_tokens;
  }
  /// Expert of a choice; -1: none.
  __device__ int expert(const NodeRouteParams& params, std::int64_t token, int topk) const {
    const std::int32_t id = ids[token * params.num_topk + topk];
    return id >= 0 && id < params.num_experts ? id : -1;
  }
};

__device__ inline int run_of(const NodeRouteParams& params, int expert) {
  return params.by_token() ? params.placement.owner[expert] : expert;
}

/// First of the items that combine returns from another node. Items that this rank sends to its own node are not
/// returned.
__device__ inline std::int32_t first_back(const NodeRouteParams& params, int node) {
  return static_cast<std::int32_t>((node < params.node() ? node : node - 1) * params.num_tokens);
}

/// A block's shared memory. Each warp numbers the tokens of a range, for each destination by itself; destinations are
/// the runs, then the nodes.
struct CountTables {
  /// More would need cudaFuncSetAttribute. Enough for all warps up to 384 destinations.
  static constexpr int kMostWords = (48 << 10) / static_cast<int>(sizeof(std::int32_t));

  int num_destinations;
  int num_experts;  ///< whose tokens are counted beside those of runs; 0: runs are experts
  int num_warps;    ///< with a range

  FERRY_HOST_DEVICE static CountTables of(const NodeRouteParams& params) {
    CountTables tables{};
    tables.num_destinations = params.num_runs() + params.num_nodes();
    tables.num_experts = params.by_token() ? params.num_experts : 0;
    const int room = (kMostWords - tables.num_experts) / tables.num_destinations;
    tables.num_warps = room < kCountWarps ? room : kCountWarps;
    return tables;
  }
  FERRY_HOST_DEVICE int num_words() const { return num_warps * num_destinations + num_experts; }

  __device__ std::int32_t* counts() const { return reinterpret_cast<std::int32_t*>(dynamic_shared()); }
  __device__ std::int32_t* counts_of(int warp) const { return counts() + warp * num_destinations; }
  __device__ std::int32_t* expert_counts() const { return counts() + num_warps * num_destinations; }
};
static_assert(CountTables::kMostWords >= kMaxRanks * kMaxNodes + kMaxNodes + kMaxExperts, "room for one warp");

/// One entry of [T, K], held by a lane.
struct CountedEntry {
  std::int64_t token = 0;
  int topk = 0;
  int expert = -1;  ///< -1: no entry, or no expert
  int run = -1;
  int node = -1;
  unsigned same_run = 0;   ///< lanes of this token with the same run
  unsigned same_node = 0;  ///< and those with the same node

  __device__ bool first_of_run() const { return expert >= 0 && __ffs(static_cast<int>(same_run)) - 1 == lane_idx(); }
  __device__ bool first_of_node() const { return expert >= 0 && __ffs(static_cast<int>(same_node)) - 1 == lane_idx(); }
};

/// Counts and numbers the tokens of one source. All threads of a block call its functions.
class SourceCount {
 public:
  __device__ SourceCount(const NodeRouteParams& params, const CountTables& tables, int source)
      : params_(params), tables_(tables), lanes_(params.num_topk), source_(source), ids_(params, source) {
    const std::int64_t num_tokens = ids_.num_tokens(params);
    const std::int64_t step = lanes_.tokens_per_warp();
    const std::int64_t steps_per_warp = (num_tokens + step * tables.num_warps - 1) / (step * tables.num_warps);
    begin_ = warp_idx() * steps_per_warp * step;
    end_ = begin_ + steps_per_warp * step;
    if (end_ > num_tokens) end_ = num_tokens;
    if (warp_idx() >= tables.num_warps) end_ = begin_;
  }

  __device__ void run() {
    for (int i = static_cast<int>(threadIdx.x); i < tables_.num_words(); i += static_cast<int>(blockDim.x)) {
      tables_.counts()[i] = 0;
    }
    __syncthreads();
    for_each_step([this](const CountedEntry& entry) { count(entry); });
    __syncthreads();
    sum_destinations();
    write_expert_counts();
    __syncthreads();
    for_each_step([this](const CountedEntry& entry) { number(entry); });
    __syncthreads();
  }

 private:
  __device__ bool is_own() const { return source_ == params_.group_rank; }
  __device__ std::int32_t* counts_of_nodes() const { return tables_.counts_of(warp_idx()) + params_.num_runs(); }

  /// Calls `visit(entry)` in all lanes of the warp for each of its steps.
  template <typename Visit>
  __device__ void for_each_step(Visit visit) const {
#pragma unroll 1
    for (std::int64_t first = begin_; first < end_; first += lanes_.tokens_per_warp()) {
      CountedEntry entry;
      entry.token = first + lanes_.token_of(lane_idx());
      entry.topk = lanes_.topk_of(lane_idx());
      if (entry.topk < params_.num_topk && entry.token < end_) {
        entry.expert = ids_.expert(params_, entry.token, entry.topk);
      }
      const bool has_expert = entry.expert >= 0;
      if (has_expert) {
        const int owner = params_.placement.owner[entry.expert];
        entry.run = params_.by_token() ? owner : entry.expert;
        entry.node = owner / params_.ranks_per_node;
      }
      entry.same_run = lanes_alike(lanes_, has_expert, entry.run);
      entry.same_node = lanes_alike(lanes_, has_expert, entry.node);
      visit(entry);
    }
  }

  __device__ void count(const CountedEntry& entry) const {
    if (entry.first_of_run()) atomicAdd(&tables_.counts_of(warp_idx())[entry.run], 1);
    if (entry.first_of_node()) atomicAdd(&counts_of_nodes()[entry.node], 1);
    if (!params_.by_token()) return;
    const unsigned same_expert = lanes_alike(lanes_, entry.expert >= 0, entry.expert);
    const bool first = entry.expert >= 0 && __ffs(static_cast<int>(same_expert)) - 1 == lane_idx();
    if (first) atomicAdd(&tables_.expert_counts()[entry.expert], 1);
  }

  /// Turns the counts of each warp into those of the warps before it, and writes the sums.
  __device__ void sum_destinations() const {
    const int num_runs = params_.num_runs();
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < tables_.num_destinations; i += static_cast<int>(blockDim.x)) {
      std::int32_t before = 0;
      for (int warp = 0; warp < tables_.num_warps; ++warp) {
        std::int32_t& word = tables_.counts_of(warp)[i];
        const std::int32_t num = word;
        word = before;
        before += num;
      }
      const int node = i - num_runs;
      if (node < 0) {
        params_.scratch.run_counts[std::int64_t{i} * params_.num_ranks + source_] = before;
        continue;
      }
      if (node == params_.node()) params_.scratch.items_in[source_] = before;
      if (is_own()) params_.scratch.items_out[node] = before;
    }
  }

  __device__ void write_expert_counts() const {
    if (!params_.by_token()) return;
    const auto thread = static_cast<int>(threadIdx.x);
    const auto num_threads = static_cast<int>(blockDim.x);
    const std::int32_t* const counts = tables_.expert_counts();
    const std::int32_t* const own = params_.placement.by_owner + params_.placement.first_of_rank[params_.group_rank];
    for (int local = thread; local < params_.num_local_experts; local += num_threads) {
      params_.scratch.expert_counts[local * params_.num_ranks + source_] = counts[own[local]];
    }
    if (!is_own() || !params_.counts_own()) return;
    for (int i = thread; i < params_.num_experts; i += num_threads) params_.scratch.own_counts[i] = counts[i];
  }

  __device__ void number(const CountedEntry& entry) const {
    const std::int32_t taken = take_position(tables_.counts_of(warp_idx()), entry.run, entry.first_of_run());
    const std::int32_t item = take_position(counts_of_nodes(), entry.node, entry.first_of_node());
    // Entries of one run share the position of the first one.
    const std::int32_t position = __shfl_sync(kAllLanes, taken, __ffs(static_cast<int>(entry.same_run)) - 1);
    const std::int64_t at = source_ * params_.blocks.max_tokens + entry.token;
    if (entry.expert >= 0) params_.scratch.positions[at * params_.num_topk + entry.topk] = position;
    if (is_own() && entry.first_of_node()) write_item_out(entry, item);
    const bool is_here = entry.first_of_node() && entry.node == params_.node();
    const unsigned here = __ballot_sync(kAllLanes, static_cast<int>(is_here)) & lanes_.of_token(lane_idx());
    const int holder = here != 0 ? __ffs(static_cast<int>(here)) - 1 : lane_idx();
    const std::int32_t item_here = __shfl_sync(kAllLanes, item, holder);
    if (entry.topk == 0 && entry.token < end_) params_.scratch.node_items[at] = here != 0 ? item_here : -1;
  }

  __device__ void write_item_out(const CountedEntry& entry, std::int32_t item) const {
    const int node = entry.node;
    const std::int64_t first = node == params_.node() ? node * params_.blocks.max_tokens : first_back(params_, node);
    params_.tables.out_tokens[node * params_.num_tokens + item] = static_cast<std::int32_t>(entry.token);
    params_.tables.item_of_token[node * params_.num_tokens + entry.token] = static_cast<std::int32_t>(first + item);
  }

  const NodeRouteParams& params_;
  CountTables tables_;
  TokenLanes lanes_;
  int source_;
  RankIds ids_;
  std::int64_t begin_;  // of this warp's tokens
  std::int64_t end_;
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTERNODE_NODE_ROUTE_COUNT_CUH
