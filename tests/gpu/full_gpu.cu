#include "gpu/full_gpu.hpp"

#include "cuda/driver/launch.hpp"
#include "cuda/sync/flags.cuh"

namespace ferry::test {
namespace {

using namespace cuda::device;  // NOLINT(google-build-using-namespace)

constexpr std::uint64_t kPatienceNs = 1'000'000'000;

struct HolderParams {
  std::uint32_t* words = nullptr;
  std::uint32_t expected = 0;
};

__global__ void holder_kernel(const HolderParams params) {
  const std::uint64_t end_ns = now_ns() + kPatienceNs;
  add_acq_rel_device(&params.words[0], 1);
  while (load_acquire_device(&params.words[0]) < params.expected) {
    if (now_ns() > end_ns) return;
  }
  add_acq_rel_device(&params.words[1], 1);
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
  const int num_blocks = full_gpu_blocks();
  return launch_holders(words, num_blocks, static_cast<std::uint32_t>(num_blocks), stream);
}

cudaError_t launch_holders(std::uint32_t* words, int num_blocks, std::uint32_t expected, cudaStream_t stream) {
  const int shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(holder_kernel),
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  return cuda::launch_kernel(holder_kernel,
                             {static_cast<unsigned>(num_blocks), 1, static_cast<std::size_t>(shared_bytes)},
                             HolderParams{words, expected}, stream);
}

}  // namespace ferry::test
