#ifndef FERRY_CUDA_PLACEMENT_PICK_CUH
#define FERRY_CUDA_PLACEMENT_PICK_CUH

/// The home that a token picks, computed where a kernel first reads its ids. Every kernel that reads them again picks
/// the same home.

#include <cstdint>

#include "cuda/placement/placement_tables.hpp"
#include "cuda/sync/report.hpp"

namespace ferry::cuda::device {

/// Exclusive upper bound of the ids that programs may name.
FERRY_HOST_DEVICE inline int num_named_experts(const PlacementTables& placement, int num_experts) {
  return placement.homes.ranges == nullptr ? num_experts : placement.homes.num_logical;
}

/// Picks a home of an expert with homes in tables; -1: it has none. Not inlined, so that calls without a placement
/// contain none of its instructions: a short kernel spends its time on fetching code.
__device__ __noinline__ inline int pick_home(const plan::HomeRange* ranges, const std::int32_t* homes, int expert,
                                             std::int64_t token, int rank) {
  const plan::HomeRange range = ranges[expert];
  if (range.count == 0) return -1;
  return homes[range.first + (range.count == 1 ? 0 : plan::pick_of(range.count, token, rank))];
}

/// Physical expert that the token of `rank` picks for the id; -1: the id is -1, no expert, or an expert without a home.
__device__ inline int pick_expert(const PlacementTables& placement, int num_experts, std::int64_t id,
                                  std::int64_t token, int rank) {
  if (id < 0 || id >= num_named_experts(placement, num_experts)) return -1;
  if (placement.homes.ranges == nullptr) return static_cast<int>(id);
  return pick_home(placement.homes.ranges, placement.homes.homes, static_cast<int>(id), token, rank);
}

/// Whether an id for which pick_expert() has returned -1 names an expert without a home. Other such ids but -1 are bad.
__device__ inline bool is_homeless(const PlacementTables& placement, int num_experts, std::int64_t id) {
  return id >= 0 && id < num_named_experts(placement, num_experts);
}

/// Hash of a placement in GPU memory, which ranks compare.
__device__ inline std::uint64_t hash_of_homes(const PlacementTables& placement) {
  return placement.homes.check == nullptr ? 0 : placement.homes.check->hash;
}

/// Overwrites a bad id with the fault of such a placement, which takes precedence.
__device__ inline void note_bad_homes(const PlacementTables& placement, std::int64_t& bad_entry, std::int64_t& bad_id) {
  const HomesCheck* const check = placement.homes.check;
  if (check == nullptr || check->bad_entry < 0) return;
  bad_entry = check->bad_entry;
  bad_id = check->bad_value;
}

/// Bad input of a rank, which makes all ranks refuse the route.
struct BadInput {
  std::int64_t rank = 0;
  std::int64_t entry = 0;  ///< from the rank's header, as is `value`
  std::int64_t value = 0;
};

/// Writes into the summary an id that is none of `num_ids`. One thread calls it.
__device__ inline void report_bad_id(RouteSummary& summary, const BadInput& bad, int num_topk, int num_ids) {
  summary.fault = static_cast<std::int32_t>(Fault::kBadId);
  summary.fault_rank = bad.rank;
  summary.fault_row = bad.entry / num_topk;
  summary.fault_column = bad.entry % num_topk;
  summary.fault_value = bad.value;
  summary.fault_limit = num_ids - 1;
}

/// Writes into the summary any kind of bad input. One thread calls it.
__device__ inline void report_bad_input(RouteSummary& summary, const BadInput& bad, int num_topk,
                                        const PlacementTables& placement, int num_experts) {
  report_bad_id(summary, bad, num_topk, num_named_experts(placement, num_experts));
  if (bad.entry < kFirstBadHome) return;
  const bool missing = bad.entry >= kFirstMissingHome;
  summary.fault = static_cast<std::int32_t>(missing ? Fault::kMissingHome : Fault::kBadHome);
  summary.fault_row = missing ? 0 : bad.entry - kFirstBadHome;
  summary.fault_column = 0;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_PLACEMENT_PICK_CUH
