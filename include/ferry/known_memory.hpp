#ifndef FERRY_KNOWN_MEMORY_HPP
#define FERRY_KNOWN_MEMORY_HPP

#include "ferry/export.hpp"

namespace ferry {

/// During its lifetime, calls of this thread on GPUs assume that tensors are in memory of the group's GPU (functions
/// without a group: of `device`) instead of asking the driver where each is, which takes some tenths of a microsecond
/// each. For callers that are certain of it for every tensor, such as libraries whose tensors name their device:
/// otherwise a kernel fails or writes elsewhere. Shapes, dtypes and strides are still checked. Nests.
class FERRY_API KnownMemory {
 public:
  KnownMemory();
  ~KnownMemory();
  KnownMemory(const KnownMemory&) = delete;
  KnownMemory& operator=(const KnownMemory&) = delete;

  /// Whether one is alive on this thread.
  static bool here();
};

}  // namespace ferry

#endif  // FERRY_KNOWN_MEMORY_HPP
