#ifndef FERRY_LOCAL_LOCAL_OPS_HPP
#define FERRY_LOCAL_LOCAL_OPS_HPP

/// Calls that need no group. The functions of this folder check the caller's arguments and resolve them to the params
/// of src/plan and src/numeric; a backend computes: on CPUs before it returns, on GPUs in stream order.

#include <string_view>

#include "ferry/status.hpp"
#include "ferry/types.hpp"
#include "numeric/gating.hpp"
#include "numeric/quantize.hpp"
#include "plan/arrival_tables.hpp"
#include "plan/expansion.hpp"
#include "plan/token_layout.hpp"

namespace ferry {

/// The public call, and where it runs.
struct LocalCall {
  std::string_view operation;  ///< name of the public call, for messages
  int device = -1;             ///< GPU; -1: the current one of the calling thread
  Stream stream;               ///< null on CPUs
};

/// A backend's part of the calls that need no group. Arguments are checked, except for the memory that pointers refer
/// to, which a backend for GPUs checks before it launches. A failure leaves outputs as they were.
struct LocalOps {
  /// dispatch_layout: counts of one rank's tokens.
  Status (*count_layout)(const LocalCall& call, const plan::TokenLayoutParams& params);
  /// arrival_tables: tables about rows that have arrived.
  Status (*write_arrivals)(const LocalCall& call, const plan::ArrivalParams& params);
  /// Rows by token to rows by expert, and the reverse.
  Status (*expand_rows)(const LocalCall& call, const plan::ExpandParams& params);
  Status (*reduce_rows)(const LocalCall& call, const plan::ReduceParams& params);
  /// Rows to FP8 or INT8, and the reverse.
  Status (*quantize)(const LocalCall& call, const numeric::QuantizeParams& params);
  Status (*dequantize)(const LocalCall& call, const numeric::QuantizeParams& params);
  /// The experts and weights of each token.
  Status (*select_experts)(const LocalCall& call, const numeric::GatingParams& params);
};

/// The table of the backend of this name.
/// @errors kUnsupported: this build lacks the backend; kInvalidArgument: there is no backend of that name
Result<const LocalOps*> find_local_ops(std::string_view operation, std::string_view backend);

}  // namespace ferry

#endif  // FERRY_LOCAL_LOCAL_OPS_HPP
