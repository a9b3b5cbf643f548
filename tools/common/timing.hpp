#ifndef FERRY_TOOLS_COMMON_TIMING_HPP
#define FERRY_TOOLS_COMMON_TIMING_HPP

#include <cstdint>
#include <vector>

#include "launch/clock.hpp"

namespace ferry::tools {

using launch::now_ns;

/// Smallest sample that at least `percent` per cent of the samples do not exceed (nearest rank). 0 without samples.
std::int64_t percentile(std::vector<std::int64_t> samples, double percent);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_COMMON_TIMING_HPP
