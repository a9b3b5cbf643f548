#ifndef FERRY_CUDA_LOCAL_ARRIVAL_TABLES_HPP
#define FERRY_CUDA_LOCAL_ARRIVAL_TABLES_HPP

#include <cuda_runtime_api.h>

#include "plan/arrival_tables.hpp"

namespace ferry::cuda {

cudaError_t launch_arrivals(const plan::ArrivalParams& params, cudaStream_t stream);
cudaError_t load_arrivals_kernel();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LOCAL_ARRIVAL_TABLES_HPP
