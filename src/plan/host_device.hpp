#ifndef FERRY_PLAN_HOST_DEVICE_HPP
#define FERRY_PLAN_HOST_DEVICE_HPP

/// Marks functions that the host and kernels share; empty for plain C++ compilers.
#if defined(__CUDACC__)
#define FERRY_HOST_DEVICE __host__ __device__
#else
#define FERRY_HOST_DEVICE
#endif

#endif  // FERRY_PLAN_HOST_DEVICE_HPP
