#ifndef FERRY_TOOLS_DEVICE_LAUNCH_SHAPE_HPP
#define FERRY_TOOLS_DEVICE_LAUNCH_SHAPE_HPP

#include <cstddef>

namespace ferry::tools {

/// Launch shape of the command's own kernels.
struct LaunchShape {
  unsigned num_blocks = 1;
  unsigned num_threads = 1;
  std::size_t shared_bytes = 0;
};

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEVICE_LAUNCH_SHAPE_HPP
