#include "cuda/one_sided/streams.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "cuda/driver/cuda_call.hpp"

namespace ferry::cuda {

UsedStreams::~UsedStreams() {
  for (const Used& used : used_) cudaEventDestroy(used.last);
}

Result<bool> UsedStreams::is_captured(std::string_view operation, cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (const cudaError_t error = cudaStreamIsCapturing(stream, &capture); error != cudaSuccess) {
    return runtime_status(error, fmt::format("{}: asking whether the stream is captured", operation));
  }
  return capture != cudaStreamCaptureStatusNone;
}

cudaError_t UsedStreams::note(cudaStream_t stream) {
  unsigned long long id = 0;
  if (const cudaError_t error = cudaStreamGetId(stream, &id); error != cudaSuccess) return error;
  const std::lock_guard lock(mutex_);
  auto found = std::ranges::find(used_, id, &Used::id);
  if (found == used_.end()) {
    cudaEvent_t event = nullptr;
    const cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    if (error != cudaSuccess) return error;
    used_.push_back({id, event});
    found = used_.end() - 1;
  }
  return cudaEventRecord(found->last, stream);
}

cudaError_t UsedStreams::wait() {
  std::vector<cudaEvent_t> events;
  {
    const std::lock_guard lock(mutex_);
    for (const Used& used : used_) events.push_back(used.last);
  }
  for (const cudaEvent_t event : events) {
    if (const cudaError_t error = cudaEventSynchronize(event); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda
