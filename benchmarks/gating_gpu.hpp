#ifndef FERRY_BENCHMARKS_GATING_GPU_HPP
#define FERRY_BENCHMARKS_GATING_GPU_HPP

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <vector>

#include "ferry/types.hpp"

namespace ferry::bench {

/// @throws std::runtime_error
void throw_if_cuda_error(cudaError_t error);

/// A vector's copy on the current GPU.
template <typename T>
class DeviceCopy {
 public:
  explicit DeviceCopy(const std::vector<T>& values) {
    throw_if_cuda_error(cudaMalloc(&data_, values.size() * sizeof(T) + 1));
    throw_if_cuda_error(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~DeviceCopy() { cudaFree(data_); }
  DeviceCopy(const DeviceCopy&) = delete;
  DeviceCopy& operator=(const DeviceCopy&) = delete;
  T* data() const { return static_cast<T*>(data_); }

 private:
  void* data_ = nullptr;
};

/// Microseconds of one call between two events, the least of several rounds; each finds the second-level cache full of
/// other data.
double time_on_stream_us(const std::function<void(Stream)>& call);

/// One kernel that reads `count` values and writes none.
void read_all(const float* values, std::size_t count, Stream stream);

}  // namespace ferry::bench

#endif  // FERRY_BENCHMARKS_GATING_GPU_HPP
