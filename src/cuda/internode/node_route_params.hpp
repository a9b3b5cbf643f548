#ifndef FERRY_CUDA_INTERNODE_NODE_ROUTE_PARAMS_HPP
#define FERRY_CUDA_INTERNODE_NODE_ROUTE_PARAMS_HPP

/// Route over several nodes by kernels, for which no host waits. Every rank gets the ids of all tokens of the group:
/// those of its rail peers over its rail, then the ids received by the ranks of its node from those ranks. From the ids
/// each rank derives its tables without further exchange, and finds the same faults as all others. Kernels, in order:
///
///   1. ids        this rank's ids and other data that the others need, in one block of memory
///   2. exchange   those blocks over the rails (exchange_params.hpp)
///   3. gather     those blocks inside the node
///   4. count      number of rows from each source in each run, and each row's position among them
///   5. sum        where runs begin; whether all rows fit; the report to the host
///   6. fill       the tables
///
/// The only known bound of other ranks' tokens is `max_tokens`. Items therefore have fixed places, with gaps: the items
/// of a node begin at a multiple of that bound, or of T for items that leave this rank.

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

/// Header before the ids of a rank.
struct alignas(16) IdsHeader {
  std::int64_t num_tokens;     ///< tokens that count
  std::int64_t max_recv_rows;  ///< 0: not bounded
  std::int64_t bad_entry;      ///< index in [T, K] of the first id that is no expert; -1: all ids are valid
  std::int64_t bad_id;
  std::uint64_t homes_hash;   ///< hash of a placement in GPU memory, else 0
  std::int64_t num_homeless;  ///< entries whose expert has no home
};

/// Block that a rank sends to all others: a header and [max_tokens, K] i32, -1 for entries without an expert.
struct IdsBlocks {
  /// Unit in which blocks are sent: enough bytes for a warp, and enough units for all warps.
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
  /// [1] number of tokens that count, perhaps out of range; null: all tokens count.
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
  const float* weights_in = nullptr;  ///< [T, K] weights that the Routing keeps, or null
  float* weights = nullptr;           ///< [T, K] of the Routing
  ItemFlow* flows = nullptr;          ///< [nodes] of the next exchange
};

struct GatherParams {
  RankParams ranks;
  EntryMessage entry;  ///< rows_offset: offset of this rank's `rail` blocks
  const RouteSummary* gate = nullptr;
  int num_nodes = 1;
  std::int64_t block_bytes = 0;
  std::byte* all = nullptr;  ///< [R] blocks
  int num_blocks = 1;
};

/// Intermediate results of the last three kernels.
struct NodeRouteScratch {
  std::int32_t* positions = nullptr;      ///< [R, max_tokens, K] position of each entry's row in its run
  std::int32_t* run_counts = nullptr;     ///< [runs, R] rows of a run from each source
  std::int32_t* run_first = nullptr;      ///< [runs, R] first of these rows
  std::int32_t* expert_counts = nullptr;  ///< [L, R] in kTokens
  std::int32_t* own_counts = nullptr;     ///< [E] of this rank's tokens, in kTokens, if the program has counters
  std::int32_t* node_items = nullptr;     ///< [R, max_tokens] position among the source's items for this node, or -1
  std::int32_t* items_in = nullptr;       ///< [R] number of these items
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
  PlacementTables placement;
  CounterTables counters;
  NodeRouteScratch scratch;
  NodeTables tables;
  RouteResultTables host;
  int num_blocks = 1;

  /// Whether experts are counted although rows are not placed by expert.
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
/// Launches the last three kernels.
cudaError_t launch_node_route(const NodeRouteParams& params, cudaStream_t stream);
cudaError_t load_node_route_kernels();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTERNODE_NODE_ROUTE_PARAMS_HPP
