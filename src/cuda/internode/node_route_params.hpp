#ifndef FERRY_CUDA_INTERNODE_NODE_ROUTE_PARAMS_HPP
#define FERRY_CUDA_INTERNODE_NODE_ROUTE_PARAMS_HPP

/// Route over several nodes by kernels, which no host waits for. Every rank gets the ids of all tokens of the group:
/// over its rail those of its rail peers, then from the ranks of its node what those got. From them each works out its
/// tables by itself, and finds the same mistakes as all others. Kernels, in their order:
///
///   1. ids        this rank's ids and what else the others must know of it, in one block of memory
///   2. exchange   those blocks over the rails (exchange_params.hpp)
///   3. gather     those blocks inside the node
///   4. count      how many rows each source sends to each run, and each row's position among those
///   5. sum        where runs begin; whether everything fits; what the host is told
///   6. fill       the tables
///
/// Nothing is known of other ranks' tokens but a bound, `max_tokens`. So items have fixed places: those of a node begin
/// at a multiple of that bound, or of T where they leave this rank, and there are gaps.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cuda/call/route_result.hpp"
#include "cuda/internode/exchange_params.hpp"
#include "cuda/internode/node_tables.hpp"
#include "cuda/placement/counters.hpp"
#include "cuda/placement/placement_tables.hpp"
#include "plan/host_device.hpp"

namespace ferry::cuda {

/// Leads the ids of a rank.
struct alignas(16) IdsHeader {
  std::int64_t num_tokens;     ///< that count
  std::int64_t max_recv_rows;  ///< 0: not bounded
  std::int64_t bad_entry;      ///< index in [T, K] of the first id that is no expert, -1: all are good
  std::int64_t bad_id;
  std::uint64_t homes_hash;  ///< of a placement that only GPUs know, else 0
};

/// What a rank tells all others: a header and [max_tokens, K] i32, -1 where there is no expert.
struct IdsBlocks {
  /// Unit in which they are sent: enough for a warp, and enough of them for all warps.
  static constexpr std::int64_t kItemBytes = 512;

  std::int64_t max_tokens = 0;
  int num_topk = 0;

  FERRY_HOST_DEVICE std::int64_t num_items() const {
    const auto used = static_cast<std::int64_t>(sizeof(IdsHeader) +
                                                sizeof(std::int32_t) * static_cast<std::size_t>(max_tokens * num_topk));
    return (used + kItemBytes - 1) / kItemBytes;
  }
  FERRY_HOST_DEVICE std::int64_t block_bytes() const { return num_items() * kItemBytes; }
};

struct IdsParams {
  IdsBlocks blocks;
  const void* topk_idx = nullptr;  ///< [T, K]
  bool wide_ids = false;           ///< i64, else i32
  /// [1] tokens that count, perhaps out of range; null: all.
  const std::int32_t* num_tokens_view = nullptr;
  std::int64_t num_tokens = 0;  ///< T
  int num_experts = 0;
  PlacementTables placement;
  int group_rank = 0;
  std::int64_t max_recv_rows = 0;
  int node = 0;
  int num_nodes = 1;
  std::byte* own = nullptr;           ///< this rank's block
  std::int64_t* ids = nullptr;        ///< [T, K] of the Routing
  const float* weights_in = nullptr;  ///< [T, K] or null: those that the Routing keeps
  float* weights = nullptr;           ///< [T, K] of the Routing
  ItemFlow* flows = nullptr;          ///< [nodes] of the exchange that follows
};

struct GatherParams {
  RankParams ranks;
  EntryMessage entry;  ///< rows_offset: of this rank's `rail` blocks
  const RouteSummary* gate = nullptr;
  int num_nodes = 1;
  std::int64_t block_bytes = 0;
  std::byte* all = nullptr;  ///< [R] blocks
  int num_blocks = 1;
};

/// What the last three kernels leave for each other.
struct NodeRouteScratch {
  std::int32_t* positions = nullptr;      ///< [R, max_tokens, K] of each entry's row in its run
  std::int32_t* run_counts = nullptr;     ///< [runs, R] rows of a run that come from a source
  std::int32_t* run_first = nullptr;      ///< [runs, R] the first of them
  std::int32_t* expert_counts = nullptr;  ///< [L, R] in kTokens
  std::int32_t* own_counts = nullptr;     ///< [E] of this rank's tokens, in kTokens, where somebody counts
  std::int32_t* node_items = nullptr;     ///< [R, max_tokens] position among the source's items for this node, or -1
  std::int32_t* items_in = nullptr;       ///< [R] number of those
  std::int32_t* items_out = nullptr;      ///< [nodes] number of this rank's items for each node
};

struct NodeRouteParams {
  RankParams ranks;
  RailState* rails = nullptr;
  int group_rank = 0;
  int num_ranks = 1;  ///< R
  int ranks_per_node = 1;
  IdsBlocks blocks;
  const std::byte* all = nullptr;  ///< [R] blocks
  std::int64_t num_tokens = 0;     ///< T
  int num_topk = 0;
  int num_experts = 0;
  int num_local_experts = 0;
  Layout layout = Layout::kTokens;
  std::int64_t expert_alignment = 1;
  std::int64_t slab_capacity = 0;
  bool latency = false;  ///< a refusal is one of latency_dispatch
  PlacementTables placement;
  CounterTables counters;
  NodeRouteScratch scratch;
  NodeTables tables;
  std::int32_t* source_ranges = nullptr;  ///< [L, R, 2] number of rows, first row; or null
  RouteResultTables host;
  int num_blocks = 1;

  /// Whether experts are counted that rows are not placed by.
  FERRY_HOST_DEVICE bool counts_own() const {
    return by_token() && (counters.logical.data != nullptr || counters.physical.data != nullptr);
  }
  FERRY_HOST_DEVICE bool by_token() const { return layout == Layout::kTokens; }
  FERRY_HOST_DEVICE int num_runs() const { return by_token() ? num_ranks : num_experts; }
  FERRY_HOST_DEVICE int num_nodes() const { return num_ranks / ranks_per_node; }
  FERRY_HOST_DEVICE int node() const { return group_rank / ranks_per_node; }
};

cudaError_t launch_ids(const IdsParams& params, cudaStream_t stream);
cudaError_t launch_gather(const GatherParams& params, cudaStream_t stream);
cudaError_t load_gather_kernels();
/// The last three.
cudaError_t launch_node_route(const NodeRouteParams& params, cudaStream_t stream);
cudaError_t load_node_route_kernels();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTERNODE_NODE_ROUTE_PARAMS_HPP
