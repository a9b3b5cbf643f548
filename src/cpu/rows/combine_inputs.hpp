#ifndef FERRY_CPU_ROWS_COMBINE_INPUTS_HPP
#define FERRY_CPU_ROWS_COMBINE_INPUTS_HPP

#include "core/backend.hpp"
#include "cpu/context/context.hpp"
#include "cpu/context/routing.hpp"

namespace ferry::cpu {

/// Publishes the locations of combine's rows and returned weights in the descriptor. Copies the weights into the arena,
/// and the rows too unless `readers_reach_rows`: all ranks that read them can reach them in place. Rows that travel as
/// FP8, and not the sums of ranks, are quantised into the arena in any case.
/// @errors those of Staging, without the name of the call
Status publish_combine_inputs(const CombineCall& call, const CpuRouting& routing, const Context& context,
                              bool readers_reach_rows, node::CallDescriptor& descriptor);

/// Rows and returned weights of a rank, as other ranks of its node read them.
struct CombineRows {
  const std::byte* rows = nullptr;
  std::int64_t stride_bytes = 0;
  const float* weights = nullptr;  ///< null if no weights are summed back
};

/// Inputs that `rank`, which has rows, published for this call. Breaks the group if they are outside its memory.
/// @errors kInternal
Result<CombineRows> resolve_combine_inputs(const CombineCall& call, const CpuRouting& routing, const Context& context,
                                           int rank);

}  // namespace ferry::cpu

#endif  // FERRY_CPU_ROWS_COMBINE_INPUTS_HPP
