#include "support/row_damage.hpp"

#include <algorithm>

namespace ferry::test {
namespace {

std::atomic<RowDamage*> current{nullptr};

}  // namespace

RowDamage::RowDamage(const Where& where, Kind kind, std::size_t bit_idx)
    : where_(where), kind_(kind), bit_idx_(bit_idx) {
  current.store(this);
  cpu::damage_for_tests.store(&RowDamage::damage);
}

RowDamage::~RowDamage() {
  cpu::damage_for_tests.store(nullptr);
  current.store(nullptr);
}

void RowDamage::damage(const cpu::CheckedRow& row) {
  RowDamage& mine = *current.load();
  const Where& where = mine.where_;
  if (row.place != where.place || row.rank != where.rank || (where.row >= 0 && row.row != where.row)) return;
  // Rows are memory that the library has written.
  auto* const bytes = const_cast<std::byte*>(row.bytes.data());
  constexpr std::size_t kBitsPerByte = 8;
  constexpr std::size_t kWordBytes = 8;
  const std::size_t byte_idx = mine.bit_idx_ / kBitsPerByte % row.bytes.size();
  switch (mine.kind_) {
    case Kind::kFlippedBit:
      bytes[byte_idx] ^= std::byte{1} << (mine.bit_idx_ % kBitsPerByte);
      break;
    case Kind::kSwappedWords:
      std::swap_ranges(bytes + byte_idx, bytes + byte_idx + kWordBytes, bytes + byte_idx + kWordBytes);
      break;
    case Kind::kZeros:
      std::fill_n(bytes, row.bytes.size(), std::byte{0});
      break;
  }
  ++mine.num_damaged_;
}

}  // namespace ferry::test
