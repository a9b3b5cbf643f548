#ifndef FERRY_EXCHANGE_H
#define FERRY_EXCHANGE_H

/// C interface: route, dispatch, combine. Include ferry/ferry.h.

#include "ferry/ferry_group.h"
#include "ferry/ferry_placement.h"

// NOLINTBEGIN(readability-identifier-naming): C has no namespaces
#ifdef __cplusplus
extern "C" {
#endif

// ---- Route, dispatch, combine ---------------------------------------------------------------------------------------
// Collective: every rank makes the same calls in the same order. `stream` is a cudaStream_t on a CUDA group, else NULL.

/// ferry::Layout of received rows.
enum { FERRY_LAYOUT_TOKENS = 0, FERRY_LAYOUT_EXPERTS = 1, FERRY_LAYOUT_SLAB = 2 };
/// ferry::Quantization.
enum {
  FERRY_QUANTIZE_NONE = 0,
  FERRY_QUANTIZE_FP8 = 1,
  FERRY_QUANTIZE_FP8_POWER_OF_TWO = 2,
  FERRY_QUANTIZE_FP8_UE8M0 = 3,
  FERRY_QUANTIZE_INT8 = 4
};
/// ferry::CopyPath.
enum { FERRY_COPY_AUTO = 0, FERRY_COPY_BULK = 1, FERRY_COPY_LOAD_STORE = 2 };

/// Destinations of every token. Valid with the group that made it; may outlive it.
typedef struct ferry_routing ferry_routing;

typedef struct ferry_route_input {
  uint64_t struct_size;
  ferry_tensor topk_idx;      ///< [T, K] i32 | i64, contiguous: global expert id, -1 = no expert
  ferry_tensor topk_weights;  ///< [T, K] f32, contiguous, or absent
} ferry_route_input;

/// ferry::EarlyTables: outputs of ferry_channel_tables for the routing in progress, of FERRY_LAYOUT_TOKENS. Written on
/// the stream of ferry_route.
typedef struct ferry_early_tables {
  uint64_t struct_size;  ///< set by the library: members past it must be left alone
  int32_t num_channels;  ///< 0: none
  int32_t reserved;
  ferry_tensor rank_prefix;          ///< [R, R]
  ferry_tensor send_channel_prefix;  ///< [R, C]
  ferry_tensor recv_channel_prefix;  ///< [R, C]
  ferry_tensor source_token;         ///< [M]: with N > M rows past M are not written, with N < M rows past N are -1
  ferry_tensor send_index;           ///< [T, R]
} ferry_early_tables;

/// `tables` is all zero except for its size; the tables named in it on return are written as the route ends. The
/// callback may call no function of the group but ferry_group_allocate.
typedef void (*ferry_while_waiting)(void* user, ferry_early_tables* tables);

/// ferry::RouteOptions. The same on every rank, except max_recv_rows, num_sms, counters and while_waiting.
typedef struct ferry_route_options {
  uint64_t struct_size;
  int64_t num_experts;                  ///< E >= 1
  int64_t expert_alignment;             ///< FERRY_LAYOUT_EXPERTS: group starts are multiples of this; 0: 1
  int64_t slab_capacity;                ///< FERRY_LAYOUT_SLAB: C, rows per local expert
  int64_t max_recv_rows;                ///< outputs have this many rows; 0: exactly as many as arrive
  int64_t max_tokens;                   ///< bound on T of any rank; 0: none
  const int32_t* expert_to_rank;        ///< rank that owns each expert; NULL: contiguous
  int64_t num_expert_to_rank;           ///< entries of expert_to_rank: E
  int32_t layout;                       ///< FERRY_LAYOUT_TOKENS, …
  int32_t num_sms;                      ///< CUDA: most multiprocessors of route's kernels; 0: all, over nodes 24
  const ferry_placement* placement;     ///< instead of expert_to_rank: experts with several homes; NULL: none
  const ferry_load_counters* counters;  ///< counters to which this call adds; NULL: none
  /// CUDA: called at most once, on this thread, when the GPU has been given the exchange and the host is about to wait
  /// for the counts: time for work that needs no counts. ferry::Group::route lists the calls that never wait. NULL:
  /// none.
  ferry_while_waiting while_waiting;
  void* user;  ///< passed to while_waiting
} ferry_route_options;

FERRY_C_API ferry_status* ferry_route(ferry_group* group, const ferry_route_input* input,
                                      const ferry_route_options* options, void* stream, ferry_routing** routing);
FERRY_C_API void ferry_routing_free(ferry_routing* routing);

FERRY_C_API int64_t ferry_routing_num_tokens(const ferry_routing* routing);
FERRY_C_API int32_t ferry_routing_num_topk(const ferry_routing* routing);
FERRY_C_API int64_t ferry_routing_num_experts(const ferry_routing* routing);
/// P, the physical experts; E without a placement.
FERRY_C_API int64_t ferry_routing_num_physical_experts(const ferry_routing* routing);
FERRY_C_API int64_t ferry_routing_num_local_experts(const ferry_routing* routing);
FERRY_C_API int32_t ferry_routing_layout(const ferry_routing* routing);
/// Rows that this rank's dispatch outputs and combine inputs must have.
FERRY_C_API int64_t ferry_routing_num_recv_rows(const ferry_routing* routing);
/// Rows in use, alignment gaps included.
FERRY_C_API int64_t ferry_routing_num_used_rows(const ferry_routing* routing);
FERRY_C_API int32_t ferry_routing_may_repeat_experts(const ferry_routing* routing);

/// Arrays of the routing; their lengths in *num. Rows per local expert [L], first row of each local expert and the end
/// [L + 1], rows from and to each rank [R], global ids of the local experts [L].
FERRY_C_API const int32_t* ferry_routing_num_rows_per_local_expert(const ferry_routing* routing, int64_t* num);
FERRY_C_API const int64_t* ferry_routing_expert_row_offsets(const ferry_routing* routing, int64_t* num);
FERRY_C_API const int64_t* ferry_routing_num_rows_from_rank(const ferry_routing* routing, int64_t* num);
FERRY_C_API const int64_t* ferry_routing_num_rows_to_rank(const ferry_routing* routing, int64_t* num);
FERRY_C_API const int32_t* ferry_routing_local_expert_ids(const ferry_routing* routing, int64_t* num);

/// Views of the routing's tables, in the backend's memory, read-only; absent if there is no such table. See
/// ferry::Routing.
FERRY_C_API void ferry_routing_slots(const ferry_routing* routing, ferry_tensor* view);
FERRY_C_API void ferry_routing_source(const ferry_routing* routing, ferry_tensor* view);
FERRY_C_API void ferry_routing_source_ranges(const ferry_routing* routing, ferry_tensor* view);
FERRY_C_API void ferry_routing_topk_idx(const ferry_routing* routing, ferry_tensor* view);
FERRY_C_API void ferry_routing_topk_weights(const ferry_routing* routing, ferry_tensor* view);
FERRY_C_API void ferry_routing_num_recv_rows_view(const ferry_routing* routing, ferry_tensor* view);
FERRY_C_API void ferry_routing_num_rows_per_local_expert_view(const ferry_routing* routing, ferry_tensor* view);
FERRY_C_API void ferry_routing_num_rows_per_expert_view(const ferry_routing* routing, ferry_tensor* view);
FERRY_C_API void ferry_routing_expert_row_offsets_view(const ferry_routing* routing, ferry_tensor* view);

typedef struct ferry_dispatch_input {
  uint64_t struct_size;
  ferry_tensor x;             ///< [T, H] any dtype
  ferry_tensor scales;        ///< [T, S] f32 | i32 | u8, or absent
  ferry_tensor topk_weights;  ///< [T, K] f32 in place of those given to route, or absent
} ferry_dispatch_input;

/// "rows" is ferry_routing_num_recv_rows.
typedef struct ferry_dispatch_output {
  uint64_t struct_size;
  ferry_tensor x;             ///< [rows, H], required; the others are filled when present
  ferry_tensor scales;        ///< [rows, S]
  ferry_tensor topk_idx;      ///< FERRY_LAYOUT_TOKENS: [rows, K] i32 | i64
  ferry_tensor topk_weights;  ///< FERRY_LAYOUT_TOKENS: [rows, K] f32; others: [rows] f32
  ferry_tensor source;        ///< [rows, 2] i32
} ferry_dispatch_output;

typedef struct ferry_dispatch_options {
  uint64_t struct_size;
  int32_t zero_padding;  ///< clear rows that hold no token
  int32_t quantize;      ///< FERRY_QUANTIZE_NONE, …
  int32_t num_sms;       ///< this and the next three as in ferry::KernelOptions
  int32_t num_copy_sms;
  int32_t chunk_tokens;
  int32_t copy_path;
  int32_t clear_if_refused;  ///< CUDA: if a call turns out to be refused, topk_idx and source become -1
  int32_t reserved;
} ferry_dispatch_options;

/// On return (CPU), or for later work on the stream (CUDA), inputs may be reused and outputs are written.
FERRY_C_API ferry_status* ferry_dispatch(ferry_group* group, const ferry_routing* routing,
                                         const ferry_dispatch_input* input, const ferry_dispatch_output* output,
                                         const ferry_dispatch_options* options, void* stream);

typedef struct ferry_combine_input {
  uint64_t struct_size;
  ferry_tensor x;             ///< [rows, H] bf16 | f32
  ferry_tensor weights;       ///< f32, summed back, or absent
  ferry_tensor bias[2];       ///< each [T, H], or absent
  ferry_tensor topk_weights;  ///< [T, K] f32 in place of those given to route, or absent
} ferry_combine_input;

typedef struct ferry_combine_output {
  uint64_t struct_size;
  ferry_tensor x;        ///< [T, H]
  ferry_tensor weights;  ///< [T, K] f32, present exactly if the input's are
} ferry_combine_output;

/// ferry::WireFormat.
enum { FERRY_WIRE_AS_GIVEN = 0, FERRY_WIRE_FP8 = 1 };

typedef struct ferry_combine_options {
  uint64_t struct_size;
  int32_t weighted;
  int32_t num_sms;
  int32_t num_copy_sms;
  int32_t chunk_tokens;
  int32_t copy_path;
  int32_t reserved;
  int32_t wire_format;  ///< FERRY_WIRE_AS_GIVEN, …; the same on every rank
  int32_t reserved_too;
} ferry_combine_options;

FERRY_C_API ferry_status* ferry_combine(ferry_group* group, const ferry_routing* routing,
                                        const ferry_combine_input* input, const ferry_combine_output* output,
                                        const ferry_combine_options* options, void* stream);

#ifdef __cplusplus
}  // extern "C"
#endif
// NOLINTEND(readability-identifier-naming)

#endif  // FERRY_EXCHANGE_H
