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

/// Work captured from a stream, which can be run any number of times. Free of CUDA's types, like device_memory.hpp.
class DeviceGraph {
 public:
  /// Captures the work that `enqueue` puts on the stream; none of it runs.
  /// @errors errors of `enqueue`; kCuda
  static Result<DeviceGraph> capture(Stream stream, const std::function<Status()>& enqueue);
  Status launch(Stream stream) const;

 private:
  std::unique_ptr<void, DestroyDeviceGraph> handle_;
};

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEVICE_DEVICE_GRAPH_HPP
