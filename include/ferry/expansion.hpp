#ifndef FERRY_EXPANSION_HPP
#define FERRY_EXPANSION_HPP

/// Rows by token turned into rows by expert and back, on this rank alone: between a dispatch and a combine of layout
/// kTokens, for programs that keep the row of each choice in a table of their own, which they may rewrite. Layout
/// kExperts needs none of it.
///
/// N rows by token, K choices of each, P rows by expert. The slot of a choice is its row by expert; any number outside
/// 0 … P - 1 means that it has none. arrival_tables computes the slots of a dispatch's rows.

#include <string_view>

#include "ferry/export.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry {

struct ExpansionOptions {
  /// expand_rows: zero the rows that no slot names; otherwise their contents are unspecified. Their weights are 0
  /// either way.
  bool zero_padding = false;
  /// "cpu": host memory, done on return. "cuda": memory of `device`, in stream order.
  std::string_view backend = "cpu";
  int device = -1;  ///< backend "cuda": ordinal of the GPU; -1: the calling thread's current one
};

/// Inputs of expand_rows: rows by token.
struct ExpandInput {
  /// [N, K] i32, K from 1 to 32, any row stride: columns from 2 on of `ArrivalTables::origin`. No slot occurs twice.
  ConstTensorView slots{};
  ConstTensorView x{};        ///< [N, H], contiguous, aligned to 16 bytes; H elements are a multiple of 16 bytes
  ConstTensorView scales{};   ///< [N, S] f32|i32, any strides; or absent
  ConstTensorView weights{};  ///< [N, K] f32, contiguous; or absent
  /// [N, K] i8, contiguous: `ArrivalTables::last_equal`. Absent: no two choices of a token have the same expert.
  ConstTensorView last_equal{};
};

/// Outputs of expand_rows: rows by expert.
struct ExpandOutput {
  TensorView x{};        ///< [P, H] as `ExpandInput::x`
  TensorView scales{};   ///< [P, S], dtype of the input's, any strides; present if the input's are
  TensorView weights{};  ///< [P] f32: sum of the weights of all choices with the slot's expert, in their order
  /// [P] i32: the row by token copied to each slot, -1 for none. Required with zero_padding, else it may be absent.
  TensorView row_of_slot{};
};

/// Copies each row to its slots. Local: no other rank takes part.
/// @sync   "cpu": done on return. "cuda": puts up to three kernels on `stream`, never blocks, may be captured
/// @errors kInvalidArgument: shape, dtype, pointer, option (nothing is written); kUnsupported: this build has no such
///         backend; kCuda: a launch failed
FERRY_API Status expand_rows(const ExpandInput& in, const ExpansionOptions& options, const ExpandOutput& out,
                             Stream stream = {});

/// Inputs of reduce_rows: rows by expert. Rows that no slot names may hold anything.
struct ReduceInput {
  ConstTensorView slots{};       ///< as in ExpandInput, but several choices may name the same row
  ConstTensorView x{};           ///< [P, H] bf16, contiguous, aligned to 16 bytes; H is a multiple of 8
  ConstTensorView weights{};     ///< [P] f32; or absent
  ConstTensorView last_equal{};  ///< as in ExpandInput
};

/// Outputs of reduce_rows: rows by token.
struct ReduceOutput {
  /// [N, H] bf16|f32: sum of each row's slots in f32, in the order of choices, rounded once; 0 where there is none.
  TensorView x{};
  /// [N, K] f32: weight of each choice's slot, the same for all choices of one expert; 0 where there is none.
  TensorView weights{};
};

/// Sums each row's slots. Local: no other rank takes part.
/// @sync   "cpu": done on return. "cuda": puts one kernel on `stream`, never blocks, may be captured in a graph
/// @errors as for expand_rows
FERRY_API Status reduce_rows(const ReduceInput& in, const ExpansionOptions& options, const ReduceOutput& out,
                             Stream stream = {});

}  // namespace ferry

#endif  // FERRY_EXPANSION_HPP
