#ifndef FERRY_TESTS_EMULATED_GPUS_MEMORY_HPP
#define FERRY_TESTS_EMULATED_GPUS_MEMORY_HPP

/// Where the emulated GPUs' memory is. All of it lies in files without a name, which other processes can map.

#include <cstddef>
#include <cstdint>
#include <optional>

namespace ferry::emulated {

enum class MemoryKind { kDevice, kPinned };

/// Addresses of one allocation, or of one that was reserved.
struct Range {
  std::uintptr_t begin = 0;
  std::size_t num_bytes = 0;
  MemoryKind kind = MemoryKind::kDevice;
  int device = 0;
  int fd = -1;  ///< its file; -1: none of its own
};

void add_range(const Range& range);
/// The range that begins there, which is no longer one.
std::optional<Range> remove_range(const void* begin);
std::optional<Range> range_around(const void* address);

/// A file of zeros; -1 if there is none to be had.
int make_file(std::size_t num_bytes);
/// Maps a file for good, where the system likes; null if it cannot.
void* map_file(int fd, std::size_t num_bytes);

}  // namespace ferry::emulated

#endif  // FERRY_TESTS_EMULATED_GPUS_MEMORY_HPP
