#include "node/page_heap.hpp"

#include <algorithm>
#include <iterator>

namespace ferry::node {

PageHeap::PageHeap(std::size_t size_bytes) {
  if (size_bytes >= kPageBytes) free_.emplace(0, size_bytes / kPageBytes * kPageBytes);
}

std::optional<std::size_t> PageHeap::take(std::size_t bytes) {
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const auto [offset, free_bytes] = *it;
    if (bytes > free_bytes) continue;
    const std::size_t taken = round_up_to_page(bytes);
    free_.erase(it);
    if (taken < free_bytes) free_.emplace(offset + taken, free_bytes - taken);
    return offset;
  }
  return std::nullopt;
}

void PageHeap::give(std::size_t offset, std::size_t bytes) {
  const std::size_t size = round_up_to_page(bytes);
  auto it = free_.emplace(offset, size).first;
  if (auto next = std::next(it); next != free_.end() && offset + size == next->first) {
    it->second += next->second;
    free_.erase(next);
  }
  if (it == free_.begin()) return;
  if (auto before = std::prev(it); before->first + before->second == offset) {
    before->second += it->second;
    free_.erase(it);
  }
}

std::size_t PageHeap::largest_free_bytes() const {
  std::size_t largest = 0;
  for (const auto& [offset, bytes] : free_) largest = std::max(largest, bytes);
  return largest;
}

}  // namespace ferry::node
