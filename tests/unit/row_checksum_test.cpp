#include "numeric/row_checksum.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <span>
#include <vector>

namespace ferry::numeric {
namespace {

constexpr std::size_t kRowBytes = 208;

std::vector<std::byte> random_row(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> row(kRowBytes);
  for (std::byte& byte : row) byte = static_cast<std::byte>(random());
  return row;
}

std::uint64_t checksum(const std::vector<std::byte>& row) { return sum_words(row.data(), row.size(), 0); }

TEST(RowChecksum, FindsEveryFlippedBit) {
  for (std::vector<std::byte> row : {random_row(1), std::vector<std::byte>(kRowBytes)}) {
    const std::uint64_t right = checksum(row);
    for (std::size_t bit = 0; bit < 8 * kRowBytes; ++bit) {
      row[bit / 8] ^= std::byte{1} << (bit % 8);
      EXPECT_NE(checksum(row), right) << bit;
      row[bit / 8] ^= std::byte{1} << (bit % 8);
    }
  }
}

/// A damaged line of a bus flips the same bit of many words.
TEST(RowChecksum, FindsTheSameBitOfTwoWords) {
  std::vector<std::byte> row = random_row(2);
  const std::uint64_t right = checksum(row);
  for (std::size_t first = 0; first < kRowBytes; ++first) {
    for (std::size_t second = first + 8; second < kRowBytes; second += 8) {
      row[first] ^= std::byte{0x80};
      row[second] ^= std::byte{0x80};
      EXPECT_NE(checksum(row), right) << first << " " << second;
      row[first] ^= std::byte{0x80};
      row[second] ^= std::byte{0x80};
    }
  }
}

TEST(RowChecksum, FindsSwappedWords) {
  std::vector<std::byte> row = random_row(3);
  const std::uint64_t right = checksum(row);
  for (std::size_t first = 0; first < kRowBytes; first += 8) {
    for (std::size_t second = first + 8; second < kRowBytes; second += 8) {
      std::vector<std::byte> swapped = row;
      std::swap_ranges(swapped.begin() + static_cast<std::ptrdiff_t>(first),
                       swapped.begin() + static_cast<std::ptrdiff_t>(first) + 8,
                       swapped.begin() + static_cast<std::ptrdiff_t>(second));
      EXPECT_NE(checksum(swapped), right) << first << " " << second;
    }
  }
}

TEST(RowChecksum, DependsOnWhoseRowItIs) {
  std::set<std::uint64_t> starts;
  for (std::uint64_t call = 0; call < 10; ++call) {
    for (std::int32_t rank = 0; rank < 10; ++rank) {
      for (std::int32_t row = 0; row < 10; ++row) starts.insert(checksum_start({call, rank, row}));
    }
  }
  EXPECT_EQ(starts.size(), 1000U);
}

TEST(RowChecksum, OfPartsIsTheirSum) {
  const std::vector<std::byte> row = random_row(4);
  for (std::size_t cut = 0; cut <= kRowBytes; cut += 8) {
    EXPECT_EQ(sum_words(row.data() + cut, kRowBytes - cut, cut) + sum_words(row.data(), cut, 0), checksum(row));
  }
}

TEST(RowChecksum, CoversAnIncompleteLastWord) {
  std::vector<std::byte> row = random_row(5);
  const std::uint64_t right = sum_words(row.data(), 12, 0);
  row[11] ^= std::byte{1};
  EXPECT_NE(sum_words(row.data(), 12, 0), right);
  row[11] ^= std::byte{1};
  row[12] ^= std::byte{1};
  EXPECT_EQ(sum_words(row.data(), 12, 0), right);
}

/// The function is part of what ranks of different builds compare; these values were computed by another program.
TEST(RowChecksum, IsTheDocumentedFunction) {
  EXPECT_EQ(mix_word(0), 0U);
  EXPECT_EQ(mix_word(kPositionStep), 0xE220A8397B1DCDAFU);  // the first number of SplitMix64 from seed 0
  EXPECT_EQ(mix_word(2 * kPositionStep), 0x6E789E6AA1B965F4U);
}

}  // namespace
}  // namespace ferry::numeric
