#ifndef FERRY_CUDA_ONE_SIDED_STREAMS_HPP
#define FERRY_CUDA_ONE_SIDED_STREAMS_HPP

/// Streams on which calls were made, for the calls that wait for all of them. Calls on different streams are not
/// ordered: one may wait for data that another sends.

#include <cuda_runtime_api.h>

#include <mutex>
#include <string_view>
#include <vector>

#include "ferry/status.hpp"

namespace ferry::cuda {

class UsedStreams {
 public:
  UsedStreams() = default;
  ~UsedStreams();
  UsedStreams(const UsedStreams&) = delete;
  UsedStreams& operator=(const UsedStreams&) = delete;

  static Result<bool> is_captured(std::string_view operation, cudaStream_t stream);
  /// Must follow a launch on the stream, which is not captured.
  cudaError_t note(cudaStream_t stream);
  /// Waits until all earlier launches are done.
  cudaError_t wait();

 private:
  struct Used {
    unsigned long long id = 0;  // CUDA's number of the stream, never reused
    cudaEvent_t last = nullptr;
  };
  std::mutex mutex_;
  std::vector<Used> used_;  // guarded by mutex_
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_ONE_SIDED_STREAMS_HPP
