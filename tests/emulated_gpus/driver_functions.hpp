#ifndef FERRY_TESTS_EMULATED_GPUS_DRIVER_FUNCTIONS_HPP
#define FERRY_TESTS_EMULATED_GPUS_DRIVER_FUNCTIONS_HPP

#include <cuda_runtime_api.h>

#include <string_view>

namespace ferry::emulated {

/// The driver's function of that name; null if there is none.
void* driver_function(std::string_view name);

cudaUUID_t uuid_of(int device);

}  // namespace ferry::emulated

#endif  // FERRY_TESTS_EMULATED_GPUS_DRIVER_FUNCTIONS_HPP
