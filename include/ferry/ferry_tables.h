#ifndef FERRY_TABLES_H
#define FERRY_TABLES_H

/// C interface: tables that describe a routing, and how one rank's tokens spread. Include ferry/ferry.h.

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

#ifdef __cplusplus
}  // extern "C"
#endif
// NOLINTEND(readability-identifier-naming)

#endif  // FERRY_TABLES_H
