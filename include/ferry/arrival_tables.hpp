#ifndef FERRY_ARRIVAL_TABLES_HPP
#define FERRY_ARRIVAL_TABLES_HPP

/// What a dispatch by token brought, in the form that interfaces hand to their users which keep it as numbers of one
/// row each: where the row comes from, and how rows are divided among ranks and experts. Made from a Routing's tables
/// and a dispatch's outputs alone, without a group and without other ranks.

#include <cstdint>
#include <string_view>

#include "ferry/export.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry {

/// Of a route of layout kTokens and its dispatch; contiguous.
struct Arrivals {
  /// [N, 2] i32: source rank and source token of each row, ascending by rank; -1 in rows without a token, which come
  /// last. `Routing::source` where rows are exact, else `DispatchOutput::source`.
  ConstTensorView source{};
  ConstTensorView topk_idx{};         ///< [N, K] i32|i64, K from 1 to 32: `DispatchOutput::topk_idx`
  ConstTensorView rows_per_expert{};  ///< [L] i32: `Routing::num_rows_per_local_expert_view`, what topk_idx has of each
  ConstTensorView sent_idx{};         ///< [T, K] i64: the ids that were routed; absent: they are not to be copied
};

struct ArrivalTablesOptions {
  int num_ranks = 1;            ///< R
  std::int64_t max_tokens = 1;  ///< M: source tokens are below it; M * R and K * R are numbers of 31 bits
  /// Experts' rows are rounded up to a multiple of it; L times it is a number of 31 bits.
  std::int64_t expert_alignment = 1;
  /// The rows are going to lie by expert (ferry/expansion.hpp): `origin` and `expert_ends` say where.
  bool expand = false;
  /// "cpu": host memory, done on return. "cuda": memory of `device`, in stream order.
  std::string_view backend = "cpu";
  int device = -1;  ///< backend "cuda": ordinal of the GPU; -1: the calling thread's current one
};

/// Contiguous; any of them may be absent.
struct ArrivalTables {
  /// [N, 2 + K] i32: M * source rank + source token; K * source rank + the last of the token's choices that is an
  /// expert here; then -1 for each choice. -1 in rows without a token.
  /// With `expand` each choice has its slot: the row by expert, then by row; an expert's rows begin where the sum of
  /// the rounded rows of those before it ends. -1 where a choice has no expert here, or a later one has the same.
  TensorView origin{};
  TensorView rows_through_rank{};  ///< [R] i32: rows from ranks 0 to r
  /// [L] i32: the sum of the rounded rows of local experts 0 to l; with `expand` that of 0 to l - 1, and the rows of l.
  TensorView expert_ends{};
  TensorView sent_idx{};        ///< [T, K] i64: a copy
  TensorView rows_of_expert{};  ///< [L] i32: a copy of rows_per_expert; only with `expand`
  /// [N, K] i8: the last choice that has the same expert, -1 where it is not here; only with `expand`.
  TensorView last_equal{};
};

/// Local: no other rank takes part.
/// @sync   "cpu": done on return. "cuda": puts one kernel on `stream`, never blocks, may be captured in a graph
/// @errors kInvalidArgument: shape, dtype, pointer (host memory with "cuda", say), option (nothing is written);
///         kUnsupported: this build has no such backend; kCuda: the launch failed
FERRY_API Status arrival_tables(const Arrivals& in, const ArrivalTablesOptions& options, const ArrivalTables& out,
                                Stream stream = {});

}  // namespace ferry

#endif  // FERRY_ARRIVAL_TABLES_HPP
