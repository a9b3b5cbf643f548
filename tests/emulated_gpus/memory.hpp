#ifndef FERRY_TESTS_EMULATED_GPUS_MEMORY_HPP
#define FERRY_TESTS_EMULATED_GPUS_MEMORY_HPP

/// Memory of the emulated GPUs. All of it lies in unnamed files, which other processes can map.

#include <cstddef>
#include <cstdint>
#include <optional>

namespace ferry::emulated {

enum class MemoryKind { kDevice, kPinned };

/// Addresses of an allocation or of a reservation.
struct Range {
  std::uintptr_t begin = 0;
  std::size_t num_bytes = 0;
  MemoryKind kind = MemoryKind::kDevice;
  int device = 0;
  int fd = -1;  ///< its file; -1: it has none of its own
};

void add_range(const Range& range);
/// Removes and returns the range that begins at `begin`.
std::optional<Range> remove_range(const void* begin);
std::optional<Range> range_around(const void* address);

/// Makes a file of zeros; returns -1 on failure.
int make_file(std::size_t num_bytes);
/// Maps a file for the life of the process, at an address that the system chooses; null on failure.
void* map_file(int fd, std::size_t num_bytes);

}  // namespace ferry::emulated

#endif  // FERRY_TESTS_EMULATED_GPUS_MEMORY_HPP
