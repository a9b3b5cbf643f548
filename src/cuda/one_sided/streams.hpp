#ifndef FERRY_CUDA_ONE_SIDED_STREAMS_HPP
#define FERRY_CUDA_ONE_SIDED_STREAMS_HPP

/// The streams that calls were made on, for the calls that wait for all of them. Calls on different streams are not
/// ordered: one may wait for what the other sends.

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
  /// After a launch on the stream, which is not captured.
  cudaError_t note(cudaStream_t stream);
  /// Until everything launched before is done.
  cudaError_t wait();

 private:
  struct Used {
    unsigned long long id = 0;  // CUDA's, never used again
    cudaEvent_t last = nullptr;
  };
  std::mutex mutex_;
  std::vector<Used> used_;  // guarded by mutex_
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_ONE_SIDED_STREAMS_HPP
