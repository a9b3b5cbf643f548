#ifndef FERRY_CUDA_NUMERIC_QUANTIZE_HPP
#define FERRY_CUDA_NUMERIC_QUANTIZE_HPP

#include <cuda_runtime_api.h>

#include "numeric/quantize.hpp"

namespace ferry::cuda {

/// Launches one kernel on at most `num_sms` multiprocessors of the current GPU. It runs at the memory speed of these
/// multiprocessors.
cudaError_t launch_quantize(const numeric::QuantizeParams& params, int num_sms, cudaStream_t stream);
cudaError_t launch_dequantize(const numeric::QuantizeParams& params, int num_sms, cudaStream_t stream);
cudaError_t load_quantize_kernels();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_NUMERIC_QUANTIZE_HPP
