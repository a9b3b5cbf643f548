#include "gpu/full_gpu.hpp"

#include "cuda/driver/launch.hpp"
#include "cuda/sync/flags.cuh"

namespace ferry::test {
namespace {

using namespace cuda::device;  // NOLINT(google-build-using-namespace)

constexpr std::uint64_t kPatienceNs = 1'000'000'000;

__global__ void full_gpu_kernel(std::uint32_t* words) {
  const std::uint64_t end_ns = now_ns() + kPatienceNs;
  add_acq_rel_device(&words[0], 1);
  while (load_acquire_device(&words[0]) < gridDim.x) {
    if (now_ns() > end_ns) return;
  }
  add_acq_rel_device(&words[1], 1);
}

int attribute(cudaDeviceAttr which) {
  int device = 0;
  int value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, which, device);
  return value;
}

}  // namespace

int full_gpu_blocks() { return attribute(cudaDevAttrMultiProcessorCount); }

cudaError_t launch_full_gpu(std::uint32_t* words, cudaStream_t stream) {
  const int shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(full_gpu_kernel),
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  return cuda::launch_kernel(full_gpu_kernel,
                             {static_cast<unsigned>(full_gpu_blocks()), 1, static_cast<std::size_t>(shared_bytes)},
                             words, stream);
}

}  // namespace ferry::test
