#ifndef FERRY_CPU_INTERNODE_ITEM_SLICES_HPP
#define FERRY_CPU_INTERNODE_ITEM_SLICES_HPP

/// An item is a payload row followed by its record (scales, ids, weights). An item longer than a chunk is sent in
/// slices: one exchange for the first part of all items, one for the second, and so on. Most items are one slice.

#include <algorithm>
#include <cstddef>

namespace ferry::cpu::internode {

/// Bytes [begin, end) of every item: of its row, and of its record.
struct ItemSlice {
  std::size_t row_begin = 0;
  std::size_t row_end = 0;
  std::size_t record_begin = 0;
  std::size_t record_end = 0;

  std::size_t row_bytes() const { return row_end - row_begin; }
  std::size_t record_bytes() const { return record_end - record_begin; }
  std::size_t bytes() const { return row_bytes() + record_bytes(); }

  /// Slice of at most `most` bytes, from byte `begin` on, of an item of `row_bytes` and `record_bytes`.
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
