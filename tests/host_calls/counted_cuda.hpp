#ifndef FERRY_TESTS_HOST_CALLS_COUNTED_CUDA_HPP
#define FERRY_TESTS_HOST_CALLS_COUNTED_CUDA_HPP

/// A CUDA runtime and driver of one GPU that launch no kernels, use host memory, and count calls.

#include <map>
#include <string>
#include <vector>

namespace ferry::test {

/// Counts of the functions used in every call, by name.
using CudaCalls = std::map<std::string, int>;

/// Counts since the previous call of this function.
CudaCalls take_cuda_calls();

/// Names of the kernels launched since the previous call of this function, as profilers show them: with the arguments
/// of templates and the types of parameters.
std::vector<std::string> take_launched_kernels();

/// Names of all kernels of the program.
std::vector<std::string> all_kernels();

/// Emulates a reset of the device: its context gets another id, and its kernels become other functions.
void reset_context();

/// Sets whether kernels can be found as functions of the driver.
void hide_functions(bool hidden);

/// Keeps the GPU `num_launches` launches behind the host: events recorded since then are not reached. 0: not behind.
void stay_behind(int num_launches);

}  // namespace ferry::test

#endif  // FERRY_TESTS_HOST_CALLS_COUNTED_CUDA_HPP
