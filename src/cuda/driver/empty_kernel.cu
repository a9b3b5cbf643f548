#include "cuda/driver/empty_kernel.hpp"
#include "cuda/driver/launch.hpp"

namespace ferry::cuda {
namespace {

struct NoParams {};

__global__ void empty_kernel(const __grid_constant__ NoParams) {}

}  // namespace

cudaError_t run_empty_kernel(cudaStream_t stream) {
  const cudaError_t error = launch_kernel(empty_kernel, {}, NoParams{}, stream);
  return error == cudaSuccess ? cudaStreamSynchronize(stream) : error;
}

}  // namespace ferry::cuda
