#ifndef FERRY_LAUNCHES_H
#define FERRY_LAUNCHES_H

/// C interface: what calls put on GPUs, and what they need not ask. Include ferry/ferry.h.

#include "ferry/ferry_base.h"

// NOLINTBEGIN(readability-identifier-naming): C has no namespaces
#ifdef __cplusplus
extern "C" {
#endif

/// ferry::KernelLaunch: one kernel of a call.
typedef struct ferry_kernel_launch {
  uint64_t struct_size;   ///< set by the library
  uint64_t shared_bytes;  ///< of a block, beside what the kernel declares
  int32_t num_blocks;
  int32_t num_copy_blocks;  ///< of those, the ones that only move rows between this rank's own buffers
  int32_t num_threads;      ///< of a block
  int32_t reserved;
} ferry_kernel_launch;

/// `launch` is good during the call. It must not make calls of this library.
typedef void (*ferry_launch_observer)(const ferry_kernel_launch* launch);

/// Has it called with each launch from now on, by the thread that makes it and before it is made. Captured launches
/// count when they are captured. Of all groups of the process, the one thing here that is; NULL, the default, ends it,
/// and a thread that is launching may still make one more call.
FERRY_C_API void ferry_observe_launches(ferry_launch_observer observer);

/// From here to the matching end, calls of this thread on GPUs take it that tensors are in memory of the group's GPU
/// (of functions without a group: of `device`), instead of asking the driver where each is: some tenths of a
/// microsecond each. For callers who know it of every tensor. Where it is wrong, a kernel fails or writes elsewhere.
/// Shapes, dtypes and strides are checked as ever. Nests; an end without a beginning does nothing.
FERRY_C_API void ferry_known_memory_begin(void);
FERRY_C_API void ferry_known_memory_end(void);

#ifdef __cplusplus
}  // extern "C"
#endif
// NOLINTEND(readability-identifier-naming)

#endif  // FERRY_LAUNCHES_H
