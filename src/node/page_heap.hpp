#ifndef FERRY_NODE_PAGE_HEAP_HPP
#define FERRY_NODE_PAGE_HEAP_HPP

/// Hands out page-aligned ranges of [0, size). First fit, neighbours merged on release: blocks are few and large.

#include <cstddef>
#include <map>
#include <optional>

namespace ferry::node {

/// Blocks start and end at multiples of this: x86-64's and AArch64's common page size, so that each can be returned to
/// the system on its own.
inline constexpr std::size_t kPageBytes = 4096;

constexpr std::size_t round_up_to_page(std::size_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

class PageHeap {
 public:
  explicit PageHeap(std::size_t size_bytes);

  /// Offset of a free range of `bytes` rounded up to pages; nothing when there is none.
  std::optional<std::size_t> take(std::size_t bytes);
  /// Return a range. `bytes` as in take.
  void give(std::size_t offset, std::size_t bytes);
  /// Longest range that can be taken.
  std::size_t largest_free_bytes() const;

 private:
  std::map<std::size_t, std::size_t> free_;  // offset -> bytes
};

}  // namespace ferry::node

#endif  // FERRY_NODE_PAGE_HEAP_HPP
