#ifndef FERRY_CUDA_LOCAL_ARRIVAL_TABLES_HPP
#define FERRY_CUDA_LOCAL_ARRIVAL_TABLES_HPP

#include <cuda_runtime_api.h>

#include "ferry/status.hpp"
#include "ferry/types.hpp"
#include "plan/arrival_tables.hpp"

namespace ferry::cuda {

/// On `device` (-1: the current one), in stream order; all pointers are memory of that GPU.
Status write_arrivals(const plan::ArrivalParams& params, int device, Stream stream);

cudaError_t launch_arrivals(const plan::ArrivalParams& params, cudaStream_t stream);
cudaError_t load_arrivals_kernel();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LOCAL_ARRIVAL_TABLES_HPP
