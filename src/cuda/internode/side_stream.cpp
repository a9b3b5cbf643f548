#include "cuda/internode/side_stream.hpp"

#include <fmt/format.h>

#include <utility>

#include "cuda/driver/cuda_call.hpp"
#include "ferry/latency.hpp"

namespace ferry::cuda::internode {

Result<std::shared_ptr<StreamPoint>> StreamPoint::create() {
  cudaEvent_t event = nullptr;
  Status status = runtime_status(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
  if (!status.ok()) return status;
  return std::make_shared<StreamPoint>(event);
}

Result<SideStream> SideStream::create(std::shared_ptr<OwnStream> stream) {
  Result<std::shared_ptr<StreamPoint>> forked = StreamPoint::create();
  if (!forked.ok()) return forked.status();
  SideStream side;
  side.stream_ = std::move(stream);
  side.forked_ = std::move(*forked);
  for (int i = 0; i < 2 * kMaxLatencyCallsInFlight; ++i) {
    Result<std::shared_ptr<StreamPoint>> point = StreamPoint::create();
    if (!point.ok()) return point.status();
    side.points_.push_back(std::move(*point));
  }
  return side;
}

Result<std::shared_ptr<StreamPoint>> SideStream::point() {
  for (const std::shared_ptr<StreamPoint>& point : points_) {
    if (point.use_count() == 1) return point;
  }
  Result<std::shared_ptr<StreamPoint>> made = StreamPoint::create();
  if (made.ok()) points_.push_back(*made);
  return made;
}

Result<Stream> SideStream::fork(std::string_view operation, Stream caller) const {
  cudaError_t error = cudaEventRecord(forked_->get(), static_cast<cudaStream_t>(caller.handle));
  if (error == cudaSuccess) error = cudaStreamWaitEvent(stream_->get(), forked_->get(), 0);
  if (error == cudaSuccess) return Stream{stream_->get()};
  return runtime_status(error, fmt::format("{}: ordering the call after its stream", operation));
}

Status SideStream::mark(std::string_view operation, const StreamPoint& point) const {
  return runtime_status(cudaEventRecord(point.get(), stream_->get()),
                        fmt::format("{}: taking note of the call's end", operation));
}

}  // namespace ferry::cuda::internode
