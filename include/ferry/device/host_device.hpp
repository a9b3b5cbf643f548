#ifndef FERRY_DEVICE_HOST_DEVICE_HPP
#define FERRY_DEVICE_HOST_DEVICE_HPP

/// Marks functions that the host and kernels share, and functions that kernels call (and tests on the host); empty for
/// plain C++ compilers.
#if defined(__CUDACC__)
#define FERRY_HOST_DEVICE __host__ __device__
#define FERRY_DEVICE __device__
#else
#define FERRY_HOST_DEVICE
#define FERRY_DEVICE
#endif

#endif  // FERRY_DEVICE_HOST_DEVICE_HPP
