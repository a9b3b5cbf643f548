#ifndef FERRY_TESTS_HOST_CALLS_COUNTED_CUDA_HPP
#define FERRY_TESTS_HOST_CALLS_COUNTED_CUDA_HPP

/// A CUDA runtime and driver of one GPU that launch nothing, whose memory is the host's, and that count calls.

#include <map>
#include <string>

namespace ferry::test {

/// Of functions that are called in every call, by name.
using CudaCalls = std::map<std::string, int>;

/// Since the last time.
CudaCalls take_cuda_calls();

/// As if the device had been reset: its context has another id, and its kernels are other functions.
void reset_context();

/// From now on kernels cannot be found as functions of the driver, or can again.
void hide_functions(bool hidden);

/// From now on the GPU is always so many launches behind the host: events recorded since then are not over. 0: none.
void stay_behind(int num_launches);

}  // namespace ferry::test

#endif  // FERRY_TESTS_HOST_CALLS_COUNTED_CUDA_HPP
