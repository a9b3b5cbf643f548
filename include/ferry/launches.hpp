#ifndef FERRY_LAUNCHES_HPP
#define FERRY_LAUNCHES_HPP

/// What calls put on GPUs, for programs that measure or share them.

#include <cstddef>

#include "ferry/export.hpp"

namespace ferry {

/// One kernel of a call.
struct KernelLaunch {
  int num_blocks = 0;
  /// Of those, the ones that only move rows between this rank's own buffers (KernelOptions::num_copy_sms): they take
  /// rows out of staging (dispatch) or put them there (combine), or copy those that stay on the rank (dispatch without
  /// staging). 0 in other kernels.
  int num_copy_blocks = 0;
  int num_threads = 0;           ///< of a block
  std::size_t shared_bytes = 0;  ///< of a block, beside what the kernel declares
};

/// Called with each launch from now on, by the thread that makes it and before it is made. Captured launches count when
/// they are captured. It must not make calls of this library. Of all groups of the process; null, the default, ends it.
using LaunchObserver = void (*)(const KernelLaunch&);
FERRY_API void observe_launches(LaunchObserver observer);

}  // namespace ferry

#endif  // FERRY_LAUNCHES_HPP
