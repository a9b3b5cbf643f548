#ifndef FERRY_PLAN_HOST_DEVICE_HPP
#define FERRY_PLAN_HOST_DEVICE_HPP

/// Layout code is used by the host and by kernels; plain C++ compilers see nothing of it.
#if defined(__CUDACC__)
#define FERRY_HOST_DEVICE __host__ __device__
#else
#define FERRY_HOST_DEVICE
#endif

#endif  // FERRY_PLAN_HOST_DEVICE_HPP
