#ifndef FERRY_TOOLS_LAUNCH_CLOCK_HPP
#define FERRY_TOOLS_LAUNCH_CLOCK_HPP

#include <cstdint>
#include <ctime>

#include "ferry/bootstrap.hpp"

namespace ferry::launch {

/// CLOCK_MONOTONIC in nanoseconds: one clock for all processes of a machine, so that times of different ranks are
/// comparable.
inline std::int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * kNsPerSecond + now.tv_nsec;
}

}  // namespace ferry::launch

#endif  // FERRY_TOOLS_LAUNCH_CLOCK_HPP
