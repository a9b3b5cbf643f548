#ifndef FERRY_CUDA_INTRANODE_ROUTE_PARAMS_HPP
#define FERRY_CUDA_INTRANODE_ROUTE_PARAMS_HPP

/// Route in two kernels: count the ids and exchange the counts, then assign every entry its destination.

#include <cuda_runtime_api.h>

#include "cuda/intranode/counter_tables.hpp"
#include "cuda/intranode/routing_tables.hpp"
#include "cuda/sync/rank_params.hpp"
#include "ferry/routing.hpp"
#include "plan/replicas.hpp"

namespace ferry::cuda {

/// What a kernel has found of a placement that only the GPU knows.
struct HomesCheck {
  std::uint64_t hash;      ///< of the table; equal tables have equal ones
  std::int64_t bad_entry;  ///< what stands for a bad id in headers, below; -1: the table is good
  std::int64_t bad_value;  ///< the wrong entry, or the expert that is missing
};
/// Beyond all entries of [T, K], which are numbered by 32 bits. The first is of physical expert 0.
inline constexpr std::int64_t kFirstBadHome = std::int64_t{1} << 40;
inline constexpr std::int64_t kFirstMissingHome = std::int64_t{1} << 41;

/// What the tokens of this rank pick from (plan/replicas.hpp), in device memory. Null: experts are those that ids name.
struct HomeTables {
  const plan::HomeRange* ranges = nullptr;   ///< [E]
  const std::int32_t* homes = nullptr;       ///< [at most P]
  const std::int32_t* logical_of = nullptr;  ///< [P] the expert whose home each is, or below 0
  int num_logical = 0;                       ///< E
  const HomesCheck* check = nullptr;         ///< null: hosts have checked the placement, and compared it
};

/// The owner of each expert, in device memory.
struct PlacementTables {
  const std::int32_t* owner = nullptr;          ///< [E]
  const std::int32_t* local_expert = nullptr;   ///< [E] index among its owner's experts
  const std::int32_t* by_owner = nullptr;       ///< [E] experts in order of (owner, id)
  const std::int32_t* first_of_rank = nullptr;  ///< [R + 1] where a rank's experts begin in `by_owner`
  HomeTables homes;
};

/// What the exchange tells the host in words that are their own flags: memory that was 0 holds kThere and a count. So
/// nothing waits until they have arrived before the host may know of them. In this order: rows of this rank, token
/// rows, repeats, rows from each rank [R], to each rank [R], of each local expert [L], and, in the layouts with groups,
/// where those begin [L + 1]. What is told of a route that is refused means nothing.
struct RouteWords {
  static constexpr std::uint64_t kThere = std::uint64_t{1} << 32;

  std::uint64_t* words = nullptr;  ///< null: nobody asks
  int num_ranks = 0;
  int num_local_experts = 0;

  FERRY_HOST_DEVICE std::uint64_t* used_rows() const { return words; }
  FERRY_HOST_DEVICE std::uint64_t* token_rows() const { return words + 1; }
  FERRY_HOST_DEVICE std::uint64_t* repeats() const { return words + 2; }
  FERRY_HOST_DEVICE std::uint64_t* from_rank() const { return words + 3; }
  FERRY_HOST_DEVICE std::uint64_t* to_rank() const { return from_rank() + num_ranks; }
  FERRY_HOST_DEVICE std::uint64_t* rows_per_expert() const { return to_rank() + num_ranks; }
  FERRY_HOST_DEVICE std::uint64_t* row_offsets() const { return rows_per_expert() + num_local_experts; }

  static constexpr std::size_t count(std::size_t num_ranks, std::size_t num_local_experts, bool groups) {
    return 3 + 2 * num_ranks + num_local_experts + (groups ? num_local_experts + 1 : 0);
  }
};

/// Where the host reads the outcome: the device's addresses of pinned memory. Null where the host does not ask.
struct RouteResultTables {
  RouteResult* result = nullptr;
  FaultReport* fault = nullptr;
  std::int64_t* from_rank = nullptr;        ///< [R]
  std::int64_t* to_rank = nullptr;          ///< [R]
  std::int32_t* rows_per_expert = nullptr;  ///< [L]
  std::int64_t* row_offsets = nullptr;      ///< [L + 1]
};

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

/// Params of what adds to counters where no kernel has counted.
struct CountersParams {
  CounterTables counters;
  PlacementTables placement;
  int num_experts = 0;
  int num_local_experts = 0;
  const std::int32_t* own_counts = nullptr;       ///< [E]
  const std::int32_t* rows_per_expert = nullptr;  ///< [L]
};
cudaError_t launch_counters(const CountersParams& params, cudaStream_t stream);
cudaError_t load_counters_kernel();

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
