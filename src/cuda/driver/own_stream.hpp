#ifndef FERRY_CUDA_DRIVER_OWN_STREAM_HPP
#define FERRY_CUDA_DRIVER_OWN_STREAM_HPP

#include <cuda_runtime_api.h>

#include <memory>

#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/empty_kernel.hpp"

namespace ferry::cuda {

/// A stream of the backend. It waits for no other stream of the program, the default one included.
class OwnStream {
 public:
  static Result<std::shared_ptr<OwnStream>> create() {
    cudaStream_t stream = nullptr;
    Status status = runtime_status(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
    if (!status.ok()) return status;
    auto made = std::make_shared<OwnStream>(stream);
    // A stream's first kernel may not start while kernels of other ranks wait on the GPU for it. With ranks of one
    // process on a shared GPU, a third of the runs hung without this empty kernel, and none has hung with it.
    status = runtime_status(run_empty_kernel(stream), "making a stream");
    if (!status.ok()) return status;
    return made;
  }

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
