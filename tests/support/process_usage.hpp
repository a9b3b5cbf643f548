#ifndef FERRY_TESTS_PROCESS_USAGE_HPP
#define FERRY_TESTS_PROCESS_USAGE_HPP

/// Machine resources of this process, for leak tests.

#include <cstddef>

namespace ferry::test {

struct ProcessUsage {
  std::size_t resident_bytes = 0;
  std::size_t new_bytes = 0;  ///< bytes in live blocks of operator new; 0 under sanitizers
  /// Bytes in live blocks of the C library's allocator, including blocks of C code; 0 if the allocator does not report
  /// them, or if it also counts freed blocks in its thread caches, up to 235 KiB a thread.
  std::size_t heap_bytes = 0;
  std::size_t num_mappings = 0;
  std::size_t num_file_mappings = 0;  ///< mappings of files, including unnamed files
  std::size_t num_descriptors = 0;
};

/// Throws if /proc is not readable.
ProcessUsage process_usage();

}  // namespace ferry::test

#endif  // FERRY_TESTS_PROCESS_USAGE_HPP
