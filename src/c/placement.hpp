#ifndef FERRY_C_PLACEMENT_HPP
#define FERRY_C_PLACEMENT_HPP

#include "ferry/ferry.h"
#include "ferry/placement.hpp"

namespace ferry::c {

/// A null `given` reads as an empty placement.
/// @errors kInvalidArgument: arrays and their length contradict each other
Status read_placement(const char* call, const ferry_placement* given, Placement& placement);
Status read_counters(const char* call, const ferry_load_counters* given, LoadCounters& counters);

}  // namespace ferry::c

#endif  // FERRY_C_PLACEMENT_HPP
