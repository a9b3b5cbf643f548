#ifndef FERRY_CUDA_CALL_DISPATCH_PARTS_HPP
#define FERRY_CUDA_CALL_DISPATCH_PARTS_HPP

/// Parts of a dispatch that a group of one node and a group of several nodes share.

#include <optional>

#include "core/quantized_dispatch.hpp"
#include "cuda/call/padding.hpp"
#include "cuda/call/tensors.hpp"
#include "cuda/context/context.hpp"
#include "cuda/sync/rank_params.hpp"

namespace ferry::cuda {

ScaleTable scale_table(const ConstTensorView& view);
DispatchOutputs dispatch_outputs(const DispatchCall& call);

/// Sets the two steps of a call that quantises, and nothing for other calls.
Status split_quantizing(Context& context, const DispatchCall& call, bool captured,
                        std::optional<QuantizedDispatch>& steps);

/// Whether the caller wants rows without a token written and there can be such rows. (An exact kTokens output has
/// none.)
bool needs_padding(const DispatchCall& call, bool exact_rows);
/// Parameters without `summary`, `source` and `max_blocks`, which the caller sets.
PaddingParams padding_params(const RankParams& ranks, const DispatchCall& call);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_CALL_DISPATCH_PARTS_HPP
