#ifndef FERRY_DEVICE_HOST_DEVICE_HPP
#define FERRY_DEVICE_HOST_DEVICE_HPP

/// Markers of functions that the host and kernels share, and of functions that kernels call (and host tests); empty for
/// plain C++ compilers.
#if defined(__CUDACC__)
#define FERRY_HOST_DEVICE __host__ __device__
#define FERRY_DEVICE __device__
#else
#define FERRY_HOST_DEVICE
#define FERRY_DEVICE
#endif

#endif  // FERRY_DEVICE_HOST_DEVICE_HPP
