#ifndef FERRY_TESTS_PROCESS_USAGE_HPP
#define FERRY_TESTS_PROCESS_USAGE_HPP

/// What this process holds of the machine, for tests that look for leaks.

#include <cstddef>

namespace ferry::test {

struct ProcessUsage {
  std::size_t resident_bytes = 0;
  std::size_t new_bytes = 0;  ///< in blocks of operator new that are in use; 0 under sanitizers
  /// In blocks of the C library's allocator that are in use, those of C code included; 0 where it does not say, and
  /// where it counts freed blocks that its threads cache too, up to 235 KiB each.
  std::size_t heap_bytes = 0;
  std::size_t num_mappings = 0;
  std::size_t num_file_mappings = 0;  ///< of them: of files, those without a name included
  std::size_t num_descriptors = 0;
};

/// Throws where /proc does not say.
ProcessUsage process_usage();

}  // namespace ferry::test

#endif  // FERRY_TESTS_PROCESS_USAGE_HPP
