#ifndef FERRY_NODE_PAGE_HEAP_HPP
#define FERRY_NODE_PAGE_HEAP_HPP

/// Allocator of page-aligned ranges of [0, size). First fit, neighbours merged on release: blocks are few and large.

#include <cstddef>
#include <map>
#include <optional>

namespace ferry::node {

/// Alignment of the start and end of blocks: the common page size of x86-64 and AArch64, so that each block can be
/// returned to the system on its own.
inline constexpr std::size_t kPageBytes = 4096;

constexpr std::size_t round_up_to_page(std::size_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

class PageHeap {
 public:
  explicit PageHeap(std::size_t size_bytes);

  /// Offset of a free range of `bytes` rounded up to pages; nullopt if there is none.
  std::optional<std::size_t> take(std::size_t bytes);
  /// Frees a range. `bytes` as in take.
  void give(std::size_t offset, std::size_t bytes);
  /// Longest range that can be taken.
  std::size_t largest_free_bytes() const;

 private:
  std::map<std::size_t, std::size_t> free_;  // offset -> bytes
};

}  // namespace ferry::node

#endif  // FERRY_NODE_PAGE_HEAP_HPP
