#ifndef FERRY_ARRIVAL_TABLES_HPP
#define FERRY_ARRIVAL_TABLES_HPP

/// Tables of the rows that a dispatch by token received: the source of each row, and how the rows divide among ranks
/// and experts. Made for interfaces that hand such numbers to their users, from a Routing's tables and a dispatch's
/// outputs alone, without a group and without other ranks.

#include <cstdint>
#include <string_view>

#include "ferry/export.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry {

/// Inputs: tables of a route of layout kTokens and outputs of its dispatch; contiguous.
struct Arrivals {
  /// [N, 2] i32: source rank and source token of each row, ascending by rank; -1 in rows without a token, which are the
  /// last ones. `Routing::source` where rows are exact, else `DispatchOutput::source`.
  ConstTensorView source{};
  ConstTensorView topk_idx{};         ///< [N, K] i32|i64, K from 1 to 32: `DispatchOutput::topk_idx`
  ConstTensorView rows_per_expert{};  ///< [L] i32: rows of each expert in topk_idx,
                                      ///< `Routing::num_rows_per_local_expert_view`
  ConstTensorView sent_idx{};         ///< [T, K] i64: the routed ids; absent: no copy is made
};

struct ArrivalTablesOptions {
  int num_ranks = 1;            ///< R
  std::int64_t max_tokens = 1;  ///< M: every source token is below it; M * R and K * R must fit in 31 bits
  /// Each expert's rows are rounded up to a multiple of it; L times it must fit in 31 bits.
  std::int64_t expert_alignment = 1;
  /// The rows will be expanded to rows by expert (ferry/expansion.hpp): `origin` and `expert_ends` then describe those.
  bool expand = false;
  /// "cpu": host memory, done on return. "cuda": memory of `device`, in stream order.
  std::string_view backend = "cpu";
  int device = -1;  ///< backend "cuda": ordinal of the GPU; -1: the calling thread's current one
};

/// Outputs; contiguous, any may be absent.
struct ArrivalTables {
  /// [N, 2 + K] i32. Column 0: M * source rank + source token. Column 1: K * source rank + the last of the token's
  /// choices whose expert is here. Columns from 2 on: -1. Rows without a token are -1 throughout.
  /// With `expand`, columns from 2 on are slots of the choices: rows by expert, numbered by expert, then by row; an
  /// expert's rows begin at the sum of the rounded rows of the experts before it. -1 where a choice has no expert here,
  /// or a later choice has the same expert.
  TensorView origin{};
  TensorView rows_through_rank{};  ///< [R] i32: rows from ranks 0 to r
  /// [L] i32: rounded rows of local experts 0 to l; with `expand`, rounded rows of 0 to l - 1 plus the rows of l.
  TensorView expert_ends{};
  TensorView sent_idx{};        ///< [T, K] i64: a copy
  TensorView rows_of_expert{};  ///< [L] i32: a copy of rows_per_expert; only with `expand`
  /// [N, K] i8: the last choice that has the same expert; -1 where that expert is not here. Only with `expand`.
  TensorView last_equal{};
};

/// Fill the tables. Local: no other rank takes part.
/// @sync   "cpu": done on return. "cuda": puts one kernel on `stream`, never blocks, may be captured in a graph
/// @errors kInvalidArgument: shape, dtype, pointer (host memory with "cuda", say), option (nothing is written);
///         kUnsupported: this build has no such backend; kCuda: the launch failed
FERRY_API Status arrival_tables(const Arrivals& in, const ArrivalTablesOptions& options, const ArrivalTables& out,
                                Stream stream = {});

}  // namespace ferry

#endif  // FERRY_ARRIVAL_TABLES_HPP
