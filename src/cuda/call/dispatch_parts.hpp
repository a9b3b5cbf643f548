#ifndef FERRY_CUDA_CALL_DISPATCH_PARTS_HPP
#define FERRY_CUDA_CALL_DISPATCH_PARTS_HPP

/// Parts of a dispatch that are the same on one node and on several.

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

/// Whether there can be rows without a token that the caller wants written. (An exact kTokens output has none.)
bool needs_padding(const DispatchCall& call, bool exact_rows);
/// Still without `summary`, `source` and `max_blocks`.
PaddingParams padding_params(const RankParams& ranks, const DispatchCall& call);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_CALL_DISPATCH_PARTS_HPP
