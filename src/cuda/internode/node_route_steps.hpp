#ifndef FERRY_CUDA_INTERNODE_NODE_ROUTE_STEPS_HPP
#define FERRY_CUDA_INTERNODE_NODE_ROUTE_STEPS_HPP

/// Kernels of a route for which no host waits, in order (node_route_params.hpp).

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cuda/internode/node_route_params.hpp"
#include "cuda/internode/steps.hpp"
#include "cuda/placement/homes_params.hpp"

namespace ferry::cuda {

/// Input of the route, and the tables of the resulting Routing.
struct NodeRouteInput {
  const void* topk_idx = nullptr;  ///< [T, K]
  bool wide_ids = false;           ///< i64, else i32
  /// [1] number of tokens that count; null: all.
  const std::int32_t* num_tokens_view = nullptr;
  const float* weights = nullptr;  ///< [T, K] or null
  std::int64_t num_tokens = 0;     ///< T
  std::int64_t max_tokens = 0;     ///< most tokens of any rank; the same on all ranks
  int num_topk = 0;
  int num_experts = 0;
  int num_local_experts = 0;
  Layout layout = Layout::kTokens;
  std::int64_t expert_alignment = 1;
  std::int64_t slab_capacity = 0;
  std::int64_t max_recv_rows = 0;  ///< 0: not bounded
  PlacementTables placement;
  HomesParams homes;  ///< homes of a placement in GPU memory; ranges is null if there is none
  CounterTables counters;
  NodeTables tables;
  RouteResultTables host;
};

/// Sizes of the tables of such a Routing with `num_rows` rows.
NodeTables::Shape bounded_tables(const Topology& topology, const NodeRouteInput& input, std::int64_t num_rows,
                                 bool weights);
/// The Routing as later kernels use it, with `num_rows` rows.
RoutedTokens bounded_tokens(const Topology& topology, const NodeRouteInput& input, std::int64_t num_rows);

/// Memory that the kernels use. `rail` is in the arena.
struct NodeRouteStaging {
  std::byte* own = nullptr;   ///< this rank's block of ids
  std::byte* rail = nullptr;  ///< [nodes] id blocks of this rank's rail
  std::byte* all = nullptr;   ///< [R]
  ItemFlow* flows = nullptr;  ///< [nodes]
  NodeRouteScratch scratch;
  std::size_t size_bytes = 0;

  static NodeRouteStaging at(std::byte* base, const Topology& topology, const NodeRouteInput& input);
};

struct NodeRouteSteps {
  HomesParams homes;
  IdsParams ids;
  ExchangeParams exchange;  ///< begins the call
  GatherParams gather;
  NodeRouteParams route;
};
NodeRouteSteps node_route_steps(const NodePlace& place, const Topology& topology, const CallIdentity& call,
                                const NodeRouteInput& input, const NodeRouteStaging& staging, const StepBlocks& blocks);
cudaError_t launch(const NodeRouteSteps& steps, cudaStream_t stream);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTERNODE_NODE_ROUTE_STEPS_HPP
