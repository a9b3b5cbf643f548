#ifndef FERRY_CUDA_INTERNODE_SIDE_STREAM_HPP
#define FERRY_CUDA_INTERNODE_SIDE_STREAM_HPP

/// Stream on which split calls run, beside the program's stream. It is the stream on which refused calls wait for the
/// peers: those calls follow all earlier calls in any case, and CUDA has few queues for streams.

#include <cuda_runtime_api.h>

#include <memory>
#include <string_view>
#include <vector>

#include "cuda/driver/own_stream.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry::cuda::internode {

/// A point in a stream's work.
class StreamPoint {
 public:
  static Result<std::shared_ptr<StreamPoint>> create();
  explicit StreamPoint(cudaEvent_t event) : event_(event) {}
  StreamPoint(const StreamPoint&) = delete;
  StreamPoint& operator=(const StreamPoint&) = delete;
  ~StreamPoint() { cudaEventDestroy(event_); }

  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_;
};

class SideStream {
 public:
  static Result<SideStream> create(std::shared_ptr<OwnStream> stream);

  /// Returns a point that no other call holds. Points are made in advance for all calls in flight, because creating an
  /// event may wait for kernels.
  Result<std::shared_ptr<StreamPoint>> point();
  /// Orders the side stream after the work on `caller`.
  Result<Stream> fork(std::string_view operation, Stream caller) const;
  /// Records the end of the side stream's work in `point`.
  Status mark(std::string_view operation, const StreamPoint& point) const;

 private:
  std::shared_ptr<OwnStream> stream_;
  std::shared_ptr<StreamPoint> forked_;
  std::vector<std::shared_ptr<StreamPoint>> points_;
};

}  // namespace ferry::cuda::internode

#endif  // FERRY_CUDA_INTERNODE_SIDE_STREAM_HPP
