#ifndef FERRY_TESTS_ROW_DAMAGE_HPP
#define FERRY_TESTS_ROW_DAMAGE_HPP

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "cpu/rows/row_check.hpp"

namespace ferry::test {

/// Damages rows of CPU ranks between their arrival and their check, in this process and those forked from it, as long
/// as it lives. One at a time.
class RowDamage {
 public:
  struct Where {
    cpu::CheckedPlace place = cpu::CheckedPlace::kFinalRow;
    int rank = 0;           ///< the rank that checks
    std::int64_t row = -1;  ///< -1: every row
  };
  enum class Kind {
    kFlippedBit,    ///< bit `bit_idx`
    kSwappedWords,  ///< the two words of 8 bytes from byte bit_idx / 8 on
    kZeros,         ///< the whole row, as if it had never been written
  };

  RowDamage(const Where& where, Kind kind, std::size_t bit_idx = 0);
  ~RowDamage();
  RowDamage(const RowDamage&) = delete;
  RowDamage& operator=(const RowDamage&) = delete;

  /// Rows damaged by this process.
  int num_damaged() const { return num_damaged_; }

 private:
  static void damage(const cpu::CheckedRow& row);

  Where where_;
  Kind kind_;
  std::size_t bit_idx_;
  std::atomic<int> num_damaged_{0};
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_ROW_DAMAGE_HPP
