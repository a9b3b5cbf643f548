#ifndef FERRY_PLACEMENT_H
#define FERRY_PLACEMENT_H

/// C interface: experts with several homes, and counters of load (ferry/placement.hpp). Include ferry/ferry.h.

#include "ferry/ferry_base.h"

// NOLINTBEGIN(readability-identifier-naming): C has no namespaces
#ifdef __cplusplus
extern "C" {
#endif

/// ferry::ReplicaChoice.
enum { FERRY_REPLICA_NEAREST = 0, FERRY_REPLICA_ROUND_ROBIN = 1 };

/// ferry::Placement: P physical experts, each a home of one of E logical ones. The same on every rank.
typedef struct ferry_placement {
  uint64_t struct_size;
  const int32_t* physical_to_logical;     ///< [P]: the logical expert of each home; -1: none
  const int32_t* physical_to_rank;        ///< [P], NULL: contiguous
  int64_t num_physical_experts;           ///< P, of both arrays; 0 if physical_to_logical_view alone is given
  ferry_tensor physical_to_logical_view;  ///< CUDA, instead of physical_to_logical: [P] i32 in GPU memory
  int32_t choice;                         ///< FERRY_REPLICA_NEAREST, …
  int32_t reserved;
  int32_t allow_homeless;  ///< not 0: experts may have no home; entries that name one count as -1
  int32_t reserved_too;
} ferry_placement;

/// ferry::LoadCounters, i64 | i32, or absent: calls add their counts to them.
typedef struct ferry_load_counters {
  uint64_t struct_size;
  ferry_tensor logical;   ///< [E]: this rank's tokens that go to each logical expert
  ferry_tensor physical;  ///< [P]: this rank's tokens that go to each physical expert
  ferry_tensor received;  ///< [L]: tokens of all ranks that each local expert receives
  ferry_tensor homeless;  ///< [1]: entries of this rank's topk_idx that name an expert without a home
} ferry_load_counters;

/// Whether calls accept this placement. Reads host memory only.
FERRY_C_API ferry_status* ferry_check_placement(const ferry_placement* placement, int64_t num_experts,
                                                int32_t num_ranks);
/// Route's pick for the tokens of `rank`: physical ids of topk_idx [T, K] i32 | i64 into output, of the same shape and
/// type. Host memory.
FERRY_C_API ferry_status* ferry_pick_replicas(const ferry_tensor* topk_idx, int64_t num_experts,
                                              const ferry_placement* placement, int32_t rank, int32_t num_ranks,
                                              int32_t ranks_per_node, const ferry_tensor* output);
/// ferry::surviving_placement: the physical experts of `kept_ranks` [num_kept_ranks] alone, with their ranks numbered
/// anew, to be used with allow_homeless and the same choice. `placement` NULL or all zero: the default one. The arrays
/// are the caller's, of `capacity` entries each, at most P or without a placement E of which are written;
/// *num_physical_experts is their number.
FERRY_C_API ferry_status* ferry_surviving_placement(const ferry_placement* placement, int64_t num_experts,
                                                    int32_t num_ranks, const int32_t* kept_ranks,
                                                    int64_t num_kept_ranks, int64_t capacity,
                                                    int32_t* physical_to_logical, int32_t* physical_to_rank,
                                                    int64_t* num_physical_experts);

#ifdef __cplusplus
}  // extern "C"
#endif
// NOLINTEND(readability-identifier-naming)

#endif  // FERRY_PLACEMENT_H
