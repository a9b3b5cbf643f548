#ifndef FERRY_CUDA_LOCAL_LOCAL_CALL_HPP
#define FERRY_CUDA_LOCAL_LOCAL_CALL_HPP

/// Checks of the caller's GPU, memory and stream around the launch of a call that needs no group.

#include <cuda_runtime_api.h>

#include <functional>

#include "local/local_ops.hpp"

namespace ferry::cuda {

/// The GPU of a call, which may be the thread's current one.
Result<int> device_of(const LocalCall& call);

/// Makes the call's GPU current and launches after `check_memory`, which gets the GPU, and the checks of the stream.
/// `launch` gets the number of the GPU's multiprocessors and the stream.
Status run_local(const LocalCall& call, const std::function<Status(int device)>& check_memory,
                 const std::function<cudaError_t(int num_sms, cudaStream_t stream)>& launch);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LOCAL_LOCAL_CALL_HPP
