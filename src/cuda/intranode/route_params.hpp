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

/// Result of a kernel's check of a placement that only the GPU knows.
struct HomesCheck {
  std::uint64_t hash;      ///< hash of the table; equal tables have equal hashes
  std::int64_t bad_entry;  ///< stands in headers for a bad id, see below; -1: the table is good
  std::int64_t bad_value;  ///< the wrong entry, or the expert without a home
};
/// Numbers above all entries of [T, K], which have 32 bits. The first stands for physical expert 0.
inline constexpr std::int64_t kFirstBadHome = std::int64_t{1} << 40;
inline constexpr std::int64_t kFirstMissingHome = std::int64_t{1} << 41;

/// Homes that this rank's tokens pick (plan/replicas.hpp), in device memory. Null: ids name the experts themselves.
struct HomeTables {
  const plan::HomeRange* ranges = nullptr;   ///< [E]
  const std::int32_t* homes = nullptr;       ///< [at most P]
  const std::int32_t* logical_of = nullptr;  ///< [P] logical expert whose home each physical expert is; negative: none
  int num_logical = 0;                       ///< E
  const HomesCheck* check = nullptr;         ///< null: hosts have checked and compared the placement
};

/// The owner of each expert, in device memory.
struct PlacementTables {
  const std::int32_t* owner = nullptr;          ///< [E]
  const std::int32_t* local_expert = nullptr;   ///< [E] index among its owner's experts
  const std::int32_t* by_owner = nullptr;       ///< [E] experts in order of (owner, id)
  const std::int32_t* first_of_rank = nullptr;  ///< [R + 1] where a rank's experts begin in `by_owner`
  HomeTables homes;
};

/// Counts that the exchange passes to the host in words that are their own flags: the memory is 0 before, then kThere
/// plus a count. No kernel has to wait for the counts to arrive before the host may see them. In order: rows of this
/// rank, token rows, repeats, rows from each rank [R], to each rank [R], of each local expert [L], and, in layouts with
/// groups, first row of each group [L + 1]. The words of a refused route are meaningless.
struct RouteWords {
  static constexpr std::uint64_t kThere = std::uint64_t{1} << 32;

  std::uint64_t* words = nullptr;  ///< null: the host does not ask
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

/// Device addresses of the pinned memory in which the host reads the outcome. Null if the host does not ask.
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

/// Parameters of the kernel that adds to counters when no kernel has counted.
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
/// Bytes of shared memory that a block of each step needs, in any layout.
std::size_t exchange_shared_bytes(int num_ranks, int num_experts);
std::size_t place_shared_bytes(int num_ranks, int num_experts);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTRANODE_ROUTE_PARAMS_HPP
