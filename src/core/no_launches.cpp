/// In builds without GPUs.

#include "ferry/launches.hpp"

namespace ferry {

void observe_launches(LaunchObserver /*observer*/) {}

}  // namespace ferry
