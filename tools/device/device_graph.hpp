#ifndef FERRY_TOOLS_DEVICE_DEVICE_GRAPH_HPP
#define FERRY_TOOLS_DEVICE_DEVICE_GRAPH_HPP

#include <functional>
#include <memory>

#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry::tools {

struct DestroyDeviceGraph {
  void operator()(void* handle) const;
};

/// Work that was captured from a stream, to be run as often as one likes. Without CUDA's types, as device_memory.hpp.
class DeviceGraph {
 public:
  /// What `enqueue` puts on the stream; none of it runs.
  /// @errors what `enqueue` returns; kCuda
  static Result<DeviceGraph> capture(Stream stream, const std::function<Status()>& enqueue);
  Status launch(Stream stream) const;

 private:
  std::unique_ptr<void, DestroyDeviceGraph> handle_;
};

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEVICE_DEVICE_GRAPH_HPP
