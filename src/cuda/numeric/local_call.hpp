#ifndef FERRY_CUDA_NUMERIC_LOCAL_CALL_HPP
#define FERRY_CUDA_NUMERIC_LOCAL_CALL_HPP

/// Calls that need no group: a launch, with checks of the caller's GPU, memory and stream.

#include <cuda_runtime_api.h>

#include <functional>
#include <string_view>

#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry::cuda {

struct LocalPlace {
  int device = -1;  ///< -1: current device of the calling thread
  Stream stream;
};

/// Calls `launch` with the GPU's number of multiprocessors and the stream, with the GPU current. Launches nothing if
/// `check_memory`, which gets the GPU, or another check fails.
Status run_local(std::string_view operation, const LocalPlace& place,
                 const std::function<Status(int device)>& check_memory,
                 const std::function<cudaError_t(int num_sms, cudaStream_t stream)>& launch);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_NUMERIC_LOCAL_CALL_HPP
