#ifndef FERRY_CUDA_INTRANODE_VERIFY_HPP
#define FERRY_CUDA_INTRANODE_VERIFY_HPP

/// The host's part of the checks of rows (GroupOptions::verify), beside that of dispatch and combine.

#include "cuda/call/routing.hpp"
#include "cuda/context/context.hpp"
#include "cuda/intranode/verify_params.hpp"

namespace ferry::cuda {

/// Takes the memory of the checks of a call, whose tokens, K and rows are in `call`.
Status take_checksums(Context& context, const DispatchParams& call, bool captured, std::byte*& memory);
Status take_checksums(Context& context, std::int64_t num_rows, bool captured, std::byte*& memory);

/// Parameters of the kernels that check a dispatch, which is ready to be launched. `num_sms`: the caller's bound.
DispatchVerifyParams verify_params(const Parts& parts, const DispatchParams& call, const CudaRouting& routing,
                                   std::byte* memory, int num_sms);

/// The same for a combine whose rows, at `x`, peers can reach; sets the summary that `call` waits for to the gate.
CombineVerifyParams verify_params(const Parts& parts, CombineParams& call, const CombineCall& asked, std::byte* memory);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTRANODE_VERIFY_HPP
