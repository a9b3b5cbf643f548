#ifndef FERRY_BALANCE_H
#define FERRY_BALANCE_H

/// C interface: placement of experts on ranks, and the copies that lead to it (ferry/balance.hpp, docs/experts.md).
/// Needs no group; host memory. Include ferry/ferry.h.

#include "ferry/ferry_base.h"

// NOLINTBEGIN(readability-identifier-naming): C has no namespaces
#ifdef __cplusplus
extern "C" {
#endif

/// Placements of all layers, and the copies that turn one into another. Read-only, usable by any thread.
typedef struct ferry_balance ferry_balance;
typedef struct ferry_move_plan ferry_move_plan;

/// ferry::BalancePolicy.
enum { FERRY_BALANCE_AUTO = 0, FERRY_BALANCE_HIERARCHICAL = 1, FERRY_BALANCE_GLOBAL = 2 };

/// ferry::BalanceOptions.
typedef struct ferry_balance_options {
  uint64_t struct_size;
  int64_t num_replicas;   ///< P: physical experts of all ranks
  int64_t max_moves;      ///< with `previous`: most experts of a layer that arrive on a rank; 0: any number, -1: none
  double move_weight;     ///< with `previous`: smallest gain per arrival, as a fraction of a rank's mean load
  ferry_tensor previous;  ///< [layers, P] i32: the placement in force, or absent
  int32_t num_groups;     ///< 0: 1
  int32_t num_nodes;      ///< 0: 1
  int32_t num_ranks;      ///< R; 0: 1
  int32_t policy;         ///< FERRY_BALANCE_AUTO, …
  int32_t max_steps;      ///< exchanges tried per layer and start; 0: 2000, -1: none
  int32_t reserved;
  ferry_interrupted interrupted;  ///< NULL: the call ends by itself; else it ends it with FERRY_ERROR_SYSTEM
  void* interrupted_user;         ///< passed to `interrupted`
} ferry_balance_options;

/// Place the experts. load: [layers, E] i32 | i64 | f32.
FERRY_C_API ferry_status* ferry_balance_create(const ferry_tensor* load, const ferry_balance_options* options,
                                               ferry_balance** balance);
FERRY_C_API void ferry_balance_free(ferry_balance* balance);

/// Filled by the library.
typedef struct ferry_balance_sizes {
  uint64_t struct_size;
  int64_t num_layers;
  int64_t num_experts;   ///< E
  int64_t num_replicas;  ///< P
  int64_t max_replicas;  ///< M: most replicas of an expert
  int32_t num_ranks;
  int32_t policy;  ///< the policy that was used
} ferry_balance_sizes;

FERRY_C_API ferry_status* ferry_balance_get_sizes(const ferry_balance* balance, ferry_balance_sizes* sizes);

/// Arrays of the balance, row-major; their lengths in *num: [layers, P] expert of each physical expert; [layers, E]
/// number of its replicas; [layers, E, M] its physical experts, then -1; [layers] load of the busiest rank; [layers]
/// mean load of a rank; [layers] experts that arrive on a rank.
FERRY_C_API const int32_t* ferry_balance_physical_to_logical(const ferry_balance* balance, int64_t* num);
FERRY_C_API const int32_t* ferry_balance_replica_counts(const ferry_balance* balance, int64_t* num);
FERRY_C_API const int32_t* ferry_balance_logical_to_physical(const ferry_balance* balance, int64_t* num);
FERRY_C_API const double* ferry_balance_max_load(const ferry_balance* balance, int64_t* num);
FERRY_C_API const double* ferry_balance_mean_load(const ferry_balance* balance, int64_t* num);
FERRY_C_API const int64_t* ferry_balance_num_moves(const ferry_balance* balance, int64_t* num);

/// ferry::ExpertCopy: one copy of one expert's weights. This struct never grows.
typedef struct ferry_expert_copy {
  int32_t layer;
  int32_t expert;
  int32_t from;  ///< physical expert; with from_staging, a staging place of from_rank
  int32_t to;    ///< physical expert; with to_staging, a staging place of to_rank
  int32_t from_rank;
  int32_t to_rank;
  int32_t from_staging;
  int32_t to_staging;
} ferry_expert_copy;

/// ferry::MovePlanOptions.
typedef struct ferry_move_plan_options {
  uint64_t struct_size;
  int64_t num_experts;  ///< E
  int32_t num_ranks;    ///< 0: 1
  int32_t num_nodes;    ///< 0: 1
} ferry_move_plan_options;

/// Plan the copies from `previous` to `next`, each [layers, P] i32.
FERRY_C_API ferry_status* ferry_move_plan_create(const ferry_tensor* previous, const ferry_tensor* next,
                                                 const ferry_move_plan_options* options, ferry_move_plan** plan);
FERRY_C_API void ferry_move_plan_free(ferry_move_plan* plan);

/// Arrays of the plan; their lengths in *num: copies by layer, then wave; [waves + 1] first copy of each wave and the
/// end; [R] staging places that each rank needs.
FERRY_C_API const ferry_expert_copy* ferry_move_plan_copies(const ferry_move_plan* plan, int64_t* num);
FERRY_C_API const int64_t* ferry_move_plan_wave_begin(const ferry_move_plan* plan, int64_t* num);
FERRY_C_API const int32_t* ferry_move_plan_num_staging(const ferry_move_plan* plan, int64_t* num);

#ifdef __cplusplus
}  // extern "C"
#endif
// NOLINTEND(readability-identifier-naming)

#endif  // FERRY_BALANCE_H
