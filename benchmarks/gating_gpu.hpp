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

/// Copies of a vector on the current GPU, one after another, to be read in turn: as many as it takes to exceed its
/// second-level cache, at most `max_copies`.
class RotatedInput {
 public:
  RotatedInput(const std::vector<float>& values, int max_copies);
  ~RotatedInput() { cudaFree(data_); }
  RotatedInput(const RotatedInput&) = delete;
  RotatedInput& operator=(const RotatedInput&) = delete;
  const float* at(int turn) const {
    return static_cast<const float*>(data_) + static_cast<std::size_t>(turn % num_copies_) * count_;
  }

 private:
  void* data_ = nullptr;
  std::size_t count_;
  int num_copies_ = 1;
};

/// Microseconds that a call takes of its stream's time on the GPU: `num_calls` are captured in one graph, which runs
/// them one after another without the host, and its time is divided by their number; the least of several runs. What a
/// graph takes to start a kernel is in it, what the host takes is not.
/// @param call (turn, stream): the turn-th call
double time_in_graph_us(int num_calls, const std::function<void(int, Stream)>& call);

/// One kernel that reads `count` values and writes none.
void read_all(const float* values, std::size_t count, Stream stream);

}  // namespace ferry::bench

#endif  // FERRY_BENCHMARKS_GATING_GPU_HPP
