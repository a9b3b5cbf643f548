#ifndef FERRY_LATENCY_H
#define FERRY_LATENCY_H

/// C interface: latency mode. Include ferry/ferry.h.

#include "ferry/ferry_exchange.h"

// NOLINTBEGIN(readability-identifier-naming): C has no namespaces
#ifdef __cplusplus
extern "C" {
#endif

/// ferry::CombineOrder.
enum { FERRY_ORDER_EXACT = 0, FERRY_ORDER_RANK_SUMS = 1 };

typedef struct ferry_latency_dispatch_input {
  uint64_t struct_size;
  ferry_tensor x;                ///< [T, H]
  ferry_tensor scales;           ///< [T, S] f32 | i32 | u8, or absent
  ferry_tensor topk_idx;         ///< [T, K] i32 | i64, contiguous
  ferry_tensor topk_weights;     ///< [T, K] f32, contiguous: kept for the combine, or absent
  ferry_tensor num_tokens_view;  ///< [1] i32: number of tokens that count, from the first on; absent: all T
} ferry_latency_dispatch_input;

typedef struct ferry_latency_dispatch_output {
  uint64_t struct_size;
  ferry_tensor x;       ///< [L, C, H] or [L*C, H]
  ferry_tensor scales;  ///< [L, C, S] or [L*C, S]
} ferry_latency_dispatch_output;

/// ferry::LatencyDispatchOptions. The same on every rank, except zero_padding, split, num_sms to copy_path,
/// counters and wait_times_ns.
typedef struct ferry_latency_dispatch_options {
  uint64_t struct_size;
  int64_t num_experts;            ///< E >= 1
  int64_t max_tokens;             ///< M >= 1: most tokens of any rank in this call
  int64_t slab_capacity;          ///< C: rows of each local expert; R * M is always enough
  const int32_t* expert_to_rank;  ///< rank that owns each expert; NULL: contiguous
  int64_t num_expert_to_rank;     ///< entries of expert_to_rank: E
  int32_t quantize;               ///< FERRY_QUANTIZE_NONE, …
  int32_t zero_padding;           ///< clear rows that hold no token
  int32_t split;                  ///< this call is the send half
  int32_t num_sms;
  int32_t num_copy_sms;
  int32_t chunk_tokens;
  int32_t copy_path;
  int32_t reserved;
  const ferry_placement* placement;  ///< this and `counters` as in ferry_route_options
  const ferry_load_counters* counters;
  ferry_tensor wait_times_ns;  ///< [R] i64, written like an output: waits for each rank are added; or absent
} ferry_latency_dispatch_options;

/// Split: inputs are read and outputs written until ferry_latency_receive, or another collective call, has finished.
FERRY_C_API ferry_status* ferry_latency_dispatch(ferry_group* group, const ferry_latency_dispatch_input* input,
                                                 const ferry_latency_dispatch_output* output,
                                                 const ferry_latency_dispatch_options* options, void* stream,
                                                 ferry_routing** routing);

typedef struct ferry_latency_combine_input {
  uint64_t struct_size;
  ferry_tensor x;             ///< [L, C, H] or [L*C, H] bf16 | f32
  ferry_tensor topk_weights;  ///< [T, K] f32 in place of those given to the dispatch, or absent
  /// These three are ferry::TileSignals: [L, ceil(C / tile_rows)] i32, or absent: all rows of x are final before the
  /// call.
  ferry_tensor signal_words;
  int64_t tile_rows;
  int32_t threshold;
  int32_t reserved;
} ferry_latency_combine_input;

typedef struct ferry_latency_combine_output {
  uint64_t struct_size;
  ferry_tensor x;  ///< [T, H]
} ferry_latency_combine_output;

typedef struct ferry_latency_combine_options {
  uint64_t struct_size;
  int32_t order;  ///< FERRY_ORDER_EXACT, …; the same on every rank
  int32_t split;  ///< this call is the send half
  int32_t num_sms;
  int32_t num_copy_sms;
  int32_t chunk_tokens;
  int32_t copy_path;
  ferry_tensor wait_times_ns;  ///< as in ferry_latency_dispatch_options
  int32_t wire_format;         ///< FERRY_WIRE_AS_GIVEN, … of the ranks' sums; the same on every rank
  int32_t reserved;
} ferry_latency_combine_options;

FERRY_C_API ferry_status* ferry_latency_combine(ferry_group* group, const ferry_routing* routing,
                                                const ferry_latency_combine_input* input,
                                                const ferry_latency_combine_output* output,
                                                const ferry_latency_combine_options* options, void* stream);
/// The receive half of the latest split call on `routing`.
FERRY_C_API ferry_status* ferry_latency_receive(ferry_group* group, const ferry_routing* routing, void* stream);

/// In groups with mask_lost_ranks: mask or unmask a rank; read all masks of this rank ([R] i32, 1 where masked); unmask
/// all ranks.
FERRY_C_API ferry_status* ferry_latency_update_mask(ferry_group* group, int32_t rank, int32_t masked, void* stream);
FERRY_C_API ferry_status* ferry_latency_query_mask(ferry_group* group, const ferry_tensor* output, void* stream);
FERRY_C_API ferry_status* ferry_latency_clear_mask(ferry_group* group, void* stream);

/// ferry::LatencyShape: bounds on the calls of latency mode that a group will make.
typedef struct ferry_latency_shape {
  uint64_t struct_size;
  const char* backend;  ///< NULL: "cpu"
  int64_t max_tokens;   ///< M
  int64_t dispatch_row_bytes;
  int64_t combine_row_bytes;
  int32_t num_ranks;  ///< R
  int32_t num_topk;   ///< K
  int32_t order;      ///< FERRY_ORDER_EXACT, …
  int32_t reserved;
} ferry_latency_shape;

/// Smallest sufficient value of ferry_group_options::latency_bytes.
FERRY_C_API ferry_status* ferry_latency_bytes_required(const ferry_latency_shape* shape, uint64_t* num_bytes);

#ifdef __cplusplus
}  // extern "C"
#endif
// NOLINTEND(readability-identifier-naming)

#endif  // FERRY_LATENCY_H
