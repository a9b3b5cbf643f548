#ifndef FERRY_TOOLS_H
#define FERRY_TOOLS_H

/// C interface: tables, quantisation and sizes around the calls. Include ferry/ferry.h.

#include "ferry/ferry_exchange.h"

// NOLINTBEGIN(readability-identifier-naming): C has no namespaces
#ifdef __cplusplus
extern "C" {
#endif

/// Outputs of ferry_channel_tables, i32 and contiguous, or absent (ferry::ChannelTables).
typedef struct ferry_channel_tables_output {
  uint64_t struct_size;
  ferry_tensor rank_prefix;          ///< [R, R]
  ferry_tensor send_channel_prefix;  ///< [R, C]
  ferry_tensor recv_channel_prefix;  ///< [R, C]
  ferry_tensor source_token;         ///< [N]
  ferry_tensor send_index;           ///< [T, R]
} ferry_channel_tables_output;

/// Describe a routing of FERRY_LAYOUT_TOKENS by C channels. Local.
FERRY_C_API ferry_status* ferry_channel_tables(ferry_group* group, const ferry_routing* routing, int32_t num_channels,
                                               const ferry_channel_tables_output* output, void* stream);

/// Execution place of a call that needs no group.
typedef struct ferry_execution_options {
  uint64_t struct_size;
  const char* backend;  ///< NULL: "cpu", done on return. "cuda": on the stream
  int32_t use_device;   ///< "cuda": memory of the GPU `device`; 0: the calling thread's current one
  int32_t device;
} ferry_execution_options;

/// ferry::DispatchLayoutOptions.
typedef struct ferry_dispatch_layout_options {
  uint64_t struct_size;
  int64_t num_experts;          ///< E
  ferry_tensor expert_to_rank;  ///< [E] i32, contiguous; absent: contiguous placement
  const char* backend;          ///< NULL: "cpu"
  int32_t num_ranks;            ///< R; 0: 1
  int32_t ranks_per_node;       ///< 0: all ranks are one node
  int32_t use_device;
  int32_t device;
} ferry_dispatch_layout_options;

/// Outputs; contiguous, any may be absent (ferry::DispatchLayout).
typedef struct ferry_dispatch_layout_output {
  uint64_t struct_size;
  ferry_tensor num_tokens_per_rank;    ///< [R] i32
  ferry_tensor num_tokens_per_node;    ///< [nodes] i32
  ferry_tensor num_tokens_per_expert;  ///< [E] i32
  ferry_tensor is_token_in_rank;       ///< [T, R] u8
} ferry_dispatch_layout_output;

/// Counts of one rank's tokens by rank, node and expert. topk_idx: [T, K] i32 | i64. Local, needs no group.
FERRY_C_API ferry_status* ferry_dispatch_layout(const ferry_tensor* topk_idx,
                                                const ferry_dispatch_layout_options* options,
                                                const ferry_dispatch_layout_output* output, void* stream);

/// ferry::Fp8ScaleFormat.
enum { FERRY_FP8_SCALE_FLOAT32 = 0, FERRY_FP8_SCALE_POWER_OF_TWO = 1, FERRY_FP8_SCALE_UE8M0 = 2 };

/// Quantise rows to one byte per channel and a scale per 128 channels, and back. x: [T, H] bf16 | f32; q: [T, H];
/// scales: [T, ceil(H/128)] f32 (u8, or [T, ceil(H/512)] i32, for UE8M0). Need no group.
FERRY_C_API ferry_status* ferry_quantize_fp8(const ferry_tensor* x, const ferry_tensor* q, const ferry_tensor* scales,
                                             int32_t scale_format, const ferry_execution_options* options,
                                             void* stream);
FERRY_C_API ferry_status* ferry_dequantize_fp8(const ferry_tensor* q, const ferry_tensor* scales, const ferry_tensor* x,
                                               const ferry_execution_options* options, void* stream);
FERRY_C_API ferry_status* ferry_quantize_int8(const ferry_tensor* x, const ferry_tensor* q, const ferry_tensor* scales,
                                              const ferry_execution_options* options, void* stream);
FERRY_C_API ferry_status* ferry_dequantize_int8(const ferry_tensor* q, const ferry_tensor* scales,
                                                const ferry_tensor* x, const ferry_execution_options* options,
                                                void* stream);

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
  int32_t reserved;
} ferry_memory_shape;

/// Symmetric memory that one rank holds for such a batch: the later ferry_memory_usage::total_bytes.
FERRY_C_API ferry_status* ferry_bytes_required(const ferry_memory_shape* shape, uint64_t* num_bytes);

#ifdef __cplusplus
}  // extern "C"
#endif
// NOLINTEND(readability-identifier-naming)

#endif  // FERRY_TOOLS_H
