#ifndef FERRY_CUDA_INTERNODE_SIDE_STREAM_HPP
#define FERRY_CUDA_INTERNODE_SIDE_STREAM_HPP

/// Where split calls run: a stream of the group's own, beside the program's. It is the one on which refused calls wait
/// for the peers: those are ordered behind all earlier calls in any case, and CUDA has few queues for streams.

#include <cuda_runtime_api.h>

#include <memory>
#include <string_view>
#include <vector>

#include "cuda/driver/own_stream.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry::cuda::internode {

/// A point in the work of a stream.
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

  /// One that nobody else holds. Made ahead for all calls that may be in flight: to make an event may wait for kernels.
  Result<std::shared_ptr<StreamPoint>> point();
  /// Orders it after what is on `caller`.
  Result<Stream> fork(std::string_view operation, Stream caller) const;
  /// Takes note of the end of what is on it.
  Status mark(std::string_view operation, const StreamPoint& point) const;

 private:
  std::shared_ptr<OwnStream> stream_;
  std::shared_ptr<StreamPoint> forked_;
  std::vector<std::shared_ptr<StreamPoint>> points_;
};

}  // namespace ferry::cuda::internode

#endif  // FERRY_CUDA_INTERNODE_SIDE_STREAM_HPP
