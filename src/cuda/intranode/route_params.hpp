#ifndef FERRY_CUDA_INTRANODE_ROUTE_PARAMS_HPP
#define FERRY_CUDA_INTRANODE_ROUTE_PARAMS_HPP

/// Route in two kernels: count the ids and exchange the counts, then assign every entry its destination.

#include <cuda_runtime_api.h>

#include "cuda/call/route_result.hpp"
#include "cuda/call/routing_tables.hpp"
#include "cuda/placement/counters.hpp"
#include "cuda/placement/placement_tables.hpp"
#include "cuda/sync/rank_params.hpp"
#include "ferry/routing.hpp"

namespace ferry::cuda {

struct RouteParams {
  RankParams ranks;
  std::uint64_t agreement = 0;  ///< 0: this rank refuses; then only the exchange runs
  std::int64_t record_number = 0;
  const void* topk_idx = nullptr;
  bool wide_ids = false;  ///< i64, else i32
  const float* weights = nullptr;
  std::int64_t num_tokens = 0;
  int num_topk = 0;
  int num_experts = 0;
  int num_local_experts = 0;
  Layout layout = Layout::kTokens;
  std::int64_t expert_alignment = 1;
  std::int64_t slab_capacity = 0;
  std::int64_t max_recv_rows = 0;
  std::int64_t source_offset = 0;  ///< in this rank's arena: its source table
  std::int64_t source_rows = 0;    ///< that this table has room for
  int tokens_per_block = 0;
  int num_blocks = 0;
  int max_blocks = 1;  ///< of a launch
  PlacementTables placement;
  RoutingTables tables;
  CounterTables counters;
  RouteResultTables host;  ///< of which only `result` and `fault`
  RouteWords host_words;
};

/// Params of the last step.
struct PlaceParams {
  RouteParams route;
  /// This rank's rows did not fit the source table that it announced: a first launch found that and did nothing, this
  /// one announces another table in its entry.
  bool announces = false;
  EntryMessage entry;                 ///< tables_offset: where that is
  std::int32_t* source = nullptr;     ///< [rows, 2] this rank's source table
  std::int64_t num_bounded_rows = 0;  ///< of a bounded route; 0: as many as it turns out to have
  bool overlaps = false;              ///< begins while the exchange ends (LaunchShape)
};

cudaError_t launch_exchange(const RouteParams& params, cudaStream_t stream);
cudaError_t launch_place(const PlaceParams& params, cudaStream_t stream);
/// Loads the kernels.
/// `shared_limit`: most shared memory of a block on this GPU.
cudaError_t load_route_kernels(std::size_t shared_limit);
/// Shared memory that a block of each step needs, whatever the layout.
std::size_t exchange_shared_bytes(int num_ranks, int num_experts);
std::size_t place_shared_bytes(int num_ranks, int num_experts);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTRANODE_ROUTE_PARAMS_HPP
