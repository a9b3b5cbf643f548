#ifndef FERRY_CPU_INTERNODE_ITEM_SLICES_HPP
#define FERRY_CPU_INTERNODE_ITEM_SLICES_HPP

/// An item is a payload row followed by its record (what is sent with a row: scales, ids, weights). One that is longer
/// than a chunk is sent in slices: one exchange for the first part of all items, one for the next, and so on. Most
/// items are one slice.

#include <algorithm>
#include <cstddef>

namespace ferry::cpu::internode {

/// Bytes [begin, end) of every item: `row_bytes` of them from its row, the others from its record.
struct ItemSlice {
  std::size_t row_begin = 0;
  std::size_t row_end = 0;
  std::size_t record_begin = 0;
  std::size_t record_end = 0;

  std::size_t row_bytes() const { return row_end - row_begin; }
  std::size_t record_bytes() const { return record_end - record_begin; }
  std::size_t bytes() const { return row_bytes() + record_bytes(); }

  /// Slice of an item of `row_bytes` and `record_bytes` that starts at byte `begin` and has at most `most` bytes.
  static ItemSlice of(std::size_t row_bytes, std::size_t record_bytes, std::size_t begin, std::size_t most) {
    const std::size_t end = std::min(begin + most, row_bytes + record_bytes);
    ItemSlice slice;
    slice.row_begin = std::min(begin, row_bytes);
    slice.row_end = std::min(end, row_bytes);
    slice.record_begin = std::max(begin, row_bytes) - row_bytes;
    slice.record_end = std::max(end, row_bytes) - row_bytes;
    return slice;
  }
};

}  // namespace ferry::cpu::internode

#endif  // FERRY_CPU_INTERNODE_ITEM_SLICES_HPP
