#ifndef FERRY_LAUNCHES_HPP
#define FERRY_LAUNCHES_HPP

/// GPU launches of calls, for programs that measure or share the GPUs.

#include <cstddef>

#include "ferry/export.hpp"

namespace ferry {

/// One kernel of a call.
struct KernelLaunch {
  int num_blocks = 0;
  /// Subset of num_blocks that only moves rows between this rank's own buffers (KernelOptions::num_copy_sms): out of
  /// staging (dispatch), into staging (combine), or rows that stay on the rank (dispatch without staging). 0 in other
  /// kernels.
  int num_copy_blocks = 0;
  int num_threads = 0;           ///< threads of a block
  std::size_t shared_bytes = 0;  ///< dynamic shared memory of a block, beside the kernel's static one
};

/// Calls `observer` with each later launch of all groups of the process, on the launching thread and before the launch.
/// Captured launches are reported when they are captured. The observer must not call this library. Null, the default,
/// ends it.
using LaunchObserver = void (*)(const KernelLaunch&);
FERRY_API void observe_launches(LaunchObserver observer);

}  // namespace ferry

#endif  // FERRY_LAUNCHES_HPP
