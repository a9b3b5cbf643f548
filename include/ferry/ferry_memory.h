#ifndef FERRY_MEMORY_H
#define FERRY_MEMORY_H

/// C interface: symmetric memory that calls need, and tensors whose memory need not be looked up. Include
/// ferry/ferry.h.

#include "ferry/ferry_base.h"

// NOLINTBEGIN(readability-identifier-naming): C has no namespaces
#ifdef __cplusplus
extern "C" {
#endif

/// ferry::MemoryShape: one rank's use of a group.
typedef struct ferry_memory_shape {
  uint64_t struct_size;
  const char* backend;          ///< NULL: "cpu"
  int64_t num_experts;          ///< E
  int64_t num_tokens;           ///< T of this rank
  int64_t num_recv_rows;        ///< ferry_routing_num_recv_rows
  int64_t num_used_rows;        ///< ferry_routing_num_used_rows; 0: all of num_recv_rows, -1: none
  int64_t row_bytes;            ///< bytes of a payload row
  int64_t scale_row_bytes;      ///< bytes of a row of scales
  int64_t quantized_row_bytes;  ///< bytes of a row after quantising by dispatch; 0: dispatch does not quantise
  int64_t max_tokens;           ///< bound on T in calls of latency mode; 0: the calls are route, dispatch, combine
  int64_t num_node_tokens;      ///< this and the next two: several nodes
  int64_t num_forwarded_tokens;
  int64_t num_node_entries;
  int64_t num_local_experts;  ///< backend "cuda"; 0: E / R, rounded up, -1: none
  uint64_t latency_bytes;     ///< ferry_group_options::latency_bytes
  int32_t num_ranks;          ///< 0: 1
  int32_t ranks_per_node;     ///< 0: all ranks on one host
  int32_t num_topk;           ///< K
  int32_t num_routings;       ///< alive at the same time; 0: 1
  int32_t layout;             ///< FERRY_LAYOUT_TOKENS, …
  int32_t weights;            ///< route is given weights
  int32_t plain_memory;       ///< payload is in memory not from ferry_group_allocate
  int32_t symmetric_tables;   ///< scales, ids and weights are in memory from ferry_group_allocate
  // Backend "cuda", with a placement:
  int64_t num_logical_experts;  ///< E, while num_experts is P; 0: no placement
  int32_t placement_on_device;  ///< the placement's physical_to_logical_view is given
  int32_t verify;               ///< any backend: ferry_group_options::verify
  int64_t combine_fp8_hidden;   ///< H of combine's rows if they travel as FERRY_WIRE_FP8; 0: they travel as they are
} ferry_memory_shape;

/// Symmetric memory that one rank holds for such a batch: the later ferry_memory_usage::total_bytes.
FERRY_C_API ferry_status* ferry_bytes_required(const ferry_memory_shape* shape, uint64_t* num_bytes);

/// From here to the matching end, calls of this thread on GPUs assume that tensors are in memory of the group's GPU
/// (functions without a group: of `device`) instead of asking the driver where each is, which takes some tenths of a
/// microsecond each. For callers that are certain of it for every tensor: otherwise a kernel fails or writes elsewhere.
/// Shapes, dtypes and strides are still checked. Nests; an end without a beginning does nothing.
FERRY_C_API void ferry_known_memory_begin(void);
FERRY_C_API void ferry_known_memory_end(void);

#ifdef __cplusplus
}  // extern "C"
#endif
// NOLINTEND(readability-identifier-naming)

#endif  // FERRY_MEMORY_H
