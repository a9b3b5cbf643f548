#ifndef FERRY_LAUNCHES_H
#define FERRY_LAUNCHES_H

/// C interface: observation of the kernels that calls launch. Include ferry/ferry.h.

#include "ferry/ferry_base.h"

// NOLINTBEGIN(readability-identifier-naming): C has no namespaces
#ifdef __cplusplus
extern "C" {
#endif

/// ferry::KernelLaunch: one kernel of a call.
typedef struct ferry_kernel_launch {
  uint64_t struct_size;   ///< set by the library
  uint64_t shared_bytes;  ///< dynamic shared memory of a block, beside the kernel's static one
  int32_t num_blocks;
  int32_t num_copy_blocks;  ///< subset that only moves rows between this rank's own buffers
  int32_t num_threads;      ///< threads of a block
  int32_t reserved;
} ferry_kernel_launch;

/// `launch` is valid during the call. The observer must not call this library.
typedef void (*ferry_launch_observer)(const ferry_kernel_launch* launch);

/// Calls `observer` with each later launch of all groups of the process, on the launching thread and before the launch.
/// Captured launches are reported when they are captured. Process-wide, unlike everything else here. NULL, the default,
/// ends it; a thread that is launching may still make one more call.
FERRY_C_API void ferry_observe_launches(ferry_launch_observer observer);

#ifdef __cplusplus
}  // extern "C"
#endif
// NOLINTEND(readability-identifier-naming)

#endif  // FERRY_LAUNCHES_H
