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
  std::uint64_t agreement = 0;  ///< 0: this rank refuses the call; only the exchange runs then
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
  std::int64_t source_offset = 0;  ///< offset of this rank's source table in its arena
  std::int64_t source_rows = 0;    ///< rows that this table has room for
  int tokens_per_block = 0;
  int num_blocks = 0;
  int max_blocks = 1;  ///< of one launch
  PlacementTables placement;
  RoutingTables tables;
  CounterTables counters;
  RouteResultTables host;  ///< only `result` and `fault` are used
  RouteWords host_words;
};

/// Parameters of the last step.
struct PlaceParams {
  RouteParams route;
  /// Whether this rank announces another source table in its entry: its rows did not fit the first one, which a
  /// previous launch found and then did nothing.
  bool announces = false;
  EntryMessage entry;                 ///< tables_offset: location of the announced table
  std::int32_t* source = nullptr;     ///< [rows, 2] this rank's source table
  std::int64_t num_bounded_rows = 0;  ///< of a bounded route; 0: the number is known only at run time
  bool overlaps = false;              ///< begins while the exchange ends (LaunchShape)
};

cudaError_t launch_exchange(const RouteParams& params, cudaStream_t stream);
cudaError_t launch_place(const PlaceParams& params, cudaStream_t stream);
/// Loads the kernels.
/// `shared_limit`: most shared memory of a block on this GPU.
cudaError_t load_route_kernels(std::size_t shared_limit);
/// Bytes of shared memory that a block of each step needs, in any layout. `num_logical`: as in ScratchOffsets.
std::size_t exchange_shared_bytes(int num_ranks, int num_experts, int num_logical);
std::size_t place_shared_bytes(int num_ranks, int num_experts);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTRANODE_ROUTE_PARAMS_HPP
