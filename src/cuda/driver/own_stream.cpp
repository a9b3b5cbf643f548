#include "cuda/driver/own_stream.hpp"

#include <map>
#include <mutex>

namespace ferry::cuda {
namespace {

/// The shared stream of each device, while a group has it.
struct SharedStreams {
  std::mutex mutex;
  std::map<int, std::weak_ptr<OwnStream>> by_device;  // guarded by mutex
};

SharedStreams& shared_streams() {
  static SharedStreams streams;
  return streams;
}

}  // namespace

Result<std::shared_ptr<OwnStream>> OwnStream::create() {
  cudaStream_t stream = nullptr;
  Status status = runtime_status(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
  if (!status.ok()) return status;
  return std::make_shared<OwnStream>(stream);
}

Result<std::shared_ptr<OwnStream>> OwnStream::shared(int device) {
  SharedStreams& streams = shared_streams();
  const std::lock_guard lock(streams.mutex);
  std::weak_ptr<OwnStream>& known = streams.by_device[device];
  if (std::shared_ptr<OwnStream> stream = known.lock()) return stream;
  Result<std::shared_ptr<OwnStream>> made = create();
  if (made.ok()) known = *made;
  return made;
}

}  // namespace ferry::cuda
