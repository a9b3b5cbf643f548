#ifndef FERRY_EXPANSION_H
#define FERRY_EXPANSION_H

/// C interface: rows by token turned into rows by expert and back. Include ferry/ferry.h. ferry/arrival_tables.hpp and
/// ferry/expansion.hpp define the tensors, their shapes and strides. All of it is local.

#include "ferry/ferry_base.h"

// NOLINTBEGIN(readability-identifier-naming): C has no namespaces
#ifdef __cplusplus
extern "C" {
#endif

/// ferry::Arrivals: rows received by a dispatch of FERRY_LAYOUT_TOKENS. N rows, K choices, L experts of this rank.
typedef struct ferry_arrivals {
  uint64_t struct_size;
  ferry_tensor source;           ///< [N, 2] i32
  ferry_tensor topk_idx;         ///< [N, K] i32 | i64: output of the dispatch
  ferry_tensor rows_per_expert;  ///< [L] i32: ferry_routing_num_rows_per_local_expert_view
  ferry_tensor sent_idx;         ///< [T, K] i64, or absent
} ferry_arrivals;

/// ferry::ArrivalTables. Any may be absent.
typedef struct ferry_arrival_tables_output {
  uint64_t struct_size;
  ferry_tensor origin;             ///< [N, 2 + K] i32; with `expand` columns from 2 on are slots
  ferry_tensor rows_through_rank;  ///< [R] i32
  ferry_tensor expert_ends;        ///< [L] i32
  ferry_tensor sent_idx;           ///< [T, K] i64
  ferry_tensor rows_of_expert;     ///< [L] i32, only with `expand`
  ferry_tensor last_equal;         ///< [N, K] i8, only with `expand`
} ferry_arrival_tables_output;

typedef struct ferry_arrival_tables_options {
  uint64_t struct_size;
  const char* backend;       ///< NULL: "cpu", done on return. "cuda": on the stream
  int64_t max_tokens;        ///< bound on the tokens of any rank; 0: 1
  int64_t expert_alignment;  ///< each expert's rows are rounded up to a multiple; 0: 1
  int32_t num_ranks;         ///< R; 0: 1
  int32_t expand;            ///< the rows will be expanded to rows by expert
  int32_t use_device;        ///< "cuda": memory of the GPU `device`; 0: the calling thread's current one
  int32_t device;
} ferry_arrival_tables_options;

FERRY_C_API ferry_status* ferry_arrival_tables(const ferry_arrivals* arrivals,
                                               const ferry_arrival_tables_options* options,
                                               const ferry_arrival_tables_output* output, void* stream);

typedef struct ferry_expansion_options {
  uint64_t struct_size;
  const char* backend;   ///< NULL: "cpu", done on return. "cuda": on the stream
  int32_t zero_padding;  ///< ferry_expand_rows: zero the rows that no slot names
  int32_t use_device;    ///< "cuda": memory of the GPU `device`; 0: the calling thread's current one
  int32_t device;
  int32_t reserved;
} ferry_expansion_options;

/// ferry::ExpandInput: rows by token.
typedef struct ferry_expand_input {
  uint64_t struct_size;
  ferry_tensor slots;       ///< [N, K] i32, any row stride
  ferry_tensor x;           ///< [N, H]
  ferry_tensor scales;      ///< [N, S] f32 | i32, or absent
  ferry_tensor weights;     ///< [N, K] f32, or absent
  ferry_tensor last_equal;  ///< [N, K] i8, or absent
} ferry_expand_input;

/// ferry::ExpandOutput: rows by expert, P of them.
typedef struct ferry_expand_output {
  uint64_t struct_size;
  ferry_tensor x;            ///< [P, H]
  ferry_tensor scales;       ///< [P, S]
  ferry_tensor weights;      ///< [P] f32
  ferry_tensor row_of_slot;  ///< [P] i32
} ferry_expand_output;

/// Copies each row to its slots.
FERRY_C_API ferry_status* ferry_expand_rows(const ferry_expand_input* input, const ferry_expansion_options* options,
                                            const ferry_expand_output* output, void* stream);

/// ferry::ReduceInput: rows by expert.
typedef struct ferry_reduce_input {
  uint64_t struct_size;
  ferry_tensor slots;       ///< [N, K] i32, any row stride
  ferry_tensor x;           ///< [P, H] bf16
  ferry_tensor weights;     ///< [P] f32, or absent
  ferry_tensor last_equal;  ///< [N, K] i8, or absent
} ferry_reduce_input;

/// ferry::ReduceOutput: rows by token.
typedef struct ferry_reduce_output {
  uint64_t struct_size;
  ferry_tensor x;        ///< [N, H] bf16 | f32
  ferry_tensor weights;  ///< [N, K] f32
} ferry_reduce_output;

/// Sums each row's slots.
FERRY_C_API ferry_status* ferry_reduce_rows(const ferry_reduce_input* input, const ferry_expansion_options* options,
                                            const ferry_reduce_output* output, void* stream);

#ifdef __cplusplus
}  // extern "C"
#endif
// NOLINTEND(readability-identifier-naming)

#endif  // FERRY_EXPANSION_H
