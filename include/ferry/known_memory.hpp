#ifndef FERRY_KNOWN_MEMORY_HPP
#define FERRY_KNOWN_MEMORY_HPP

#include "ferry/export.hpp"

namespace ferry {

/// While it lives, calls of this thread on GPUs take it that tensors are in memory of the group's GPU (of groupless
/// functions: of `device`), instead of asking the driver where each is: some tenths of a microsecond each. For callers
/// who know it of every tensor, as libraries whose tensors name their device do. Where it is wrong, a kernel fails or
/// writes elsewhere. Shapes, dtypes and strides are checked as ever. Nests.
class FERRY_API KnownMemory {
 public:
  KnownMemory();
  ~KnownMemory();
  KnownMemory(const KnownMemory&) = delete;
  KnownMemory& operator=(const KnownMemory&) = delete;

  /// Whether this thread has one.
  static bool here();
};

}  // namespace ferry

#endif  // FERRY_KNOWN_MEMORY_HPP
