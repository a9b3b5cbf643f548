#ifndef FERRY_CUDA_DRIVER_OWN_STREAM_HPP
#define FERRY_CUDA_DRIVER_OWN_STREAM_HPP

#include <cuda_runtime_api.h>

#include <memory>

#include "cuda/driver/cuda_call.hpp"

namespace ferry::cuda {

/// A stream of the backend's own. It waits for no other stream of the program, the default one included.
class OwnStream {
 public:
  /// On the current device.
  static Result<std::shared_ptr<OwnStream>> create();
  /// The one that this process's groups on `device`, the current one, share. For work that waits for no rank: streams
  /// that share one of a GPU's at most 32 hardware queues (CUDA C++ Programming Guide, CUDA_DEVICE_MAX_CONNECTIONS)
  /// wait for each other, and with a few per rank as many threads of a process as there are ranks would need more.
  static Result<std::shared_ptr<OwnStream>> shared(int device);

  explicit OwnStream(cudaStream_t stream) : stream_(stream) {}
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  ~OwnStream() { cudaStreamDestroy(stream_); }

  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_;
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_DRIVER_OWN_STREAM_HPP
