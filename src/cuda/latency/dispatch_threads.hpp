#ifndef FERRY_CUDA_LATENCY_DISPATCH_THREADS_HPP
#define FERRY_CUDA_LATENCY_DISPATCH_THREADS_HPP

namespace ferry::cuda {

/// Threads of a block of latency_dispatch, of either half or both.
inline constexpr int kDispatchThreads = 512;
/// Bytes of a row that a warp of the receive half copies at a time.
inline constexpr int kReceiveStepBytes = 1024;

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LATENCY_DISPATCH_THREADS_HPP
