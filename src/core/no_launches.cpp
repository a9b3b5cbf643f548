/// Launch observation in builds without GPUs: no kernel is ever launched.

#include "ferry/launches.hpp"

namespace ferry {

void observe_launches(LaunchObserver /*observer*/) {}

}  // namespace ferry
