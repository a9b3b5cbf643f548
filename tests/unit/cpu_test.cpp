/// Parts of the CPU backend on their own: the page heap, the arena, the sums.

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>

#include "cpu/rows/row_copy.hpp"
#include "cpu/rows/row_sum.hpp"
#include "node/arena.hpp"
#include "node/page_heap.hpp"

namespace ferry::cpu {

using namespace node;  // both namespaces are tested here

namespace {

TEST(PageHeap, ReusesAndMergesFreedRanges) {
  PageHeap heap(4 * kPageBytes);
  const auto a = heap.take(1);
  const auto b = heap.take(kPageBytes + 1);
  const auto c = heap.take(kPageBytes);
  ASSERT_TRUE(a && b && c);
  EXPECT_FALSE(heap.take(1)) << "all four pages are taken";
  heap.give(*a, 1);
  heap.give(*c, kPageBytes);
  EXPECT_EQ(heap.largest_free_bytes(), kPageBytes);
  heap.give(*b, kPageBytes + 1);
  EXPECT_EQ(heap.largest_free_bytes(), 4 * kPageBytes);
  EXPECT_EQ(heap.take(4 * kPageBytes), 0U);
}

TEST(Arena, BlocksAreZeroedEvenWhenReused) {
  auto arena = Arena::create(1 << 20).value();
  {
    const Buffer buffer = arena->allocate(100).value();
    std::memset(buffer.data(), 7, buffer.size_bytes());
  }
  const Buffer again = arena->allocate(100).value();
  for (std::size_t i = 0; i < again.size_bytes(); ++i) EXPECT_EQ(static_cast<const char*>(again.data())[i], 0);
}

TEST(Arena, BlocksKeepItAlive) {
  Buffer buffer;
  {
    auto arena = Arena::create(1 << 20).value();
    buffer = arena->allocate(10).value();
  }
  std::memset(buffer.data(), 1, buffer.size_bytes());
}

TEST(Arena, RefusesAFileThatCouldShrink) {
  UniqueFd fd(memfd_create("ferry-test", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(fd.get(), 1 << 20), 0);
  EXPECT_EQ(ArenaMapping::map_peer(std::move(fd)).status().code(), ErrorCode::kTransport);
}

float float_from_bf16(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

/// Written independently of the code under test, one operation at a time.
std::uint16_t expected_bf16(float value) {
  if (std::isnan(value)) return 0x7FFF;
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t low = bits & 0xFFFFU;
  std::uint32_t high = bits >> 16;
  if (low > 0x8000U || (low == 0x8000U && (high & 1U) != 0)) ++high;
  return static_cast<std::uint16_t>(high);
}

class RowSums : public testing::TestWithParam<std::size_t> {};

TEST_P(RowSums, AllInstructionSetsGiveTheBitsOfTheScalarFormula) {
  const std::size_t num_elements = GetParam();
  std::mt19937_64 random(num_elements);
  std::size_t count = 0;
  const RowSumVariant* variants = row_sum_variants(&count);
  for (std::size_t num_rows : {0U, 1U, 2U, 5U, 32U}) {
    std::vector<std::vector<std::uint16_t>> rows(num_rows, std::vector<std::uint16_t>(num_elements));
    std::vector<const std::byte*> pointers;
    std::vector<float> weights;
    for (auto& row : rows) {
      for (auto& value : row) value = static_cast<std::uint16_t>(random());  // NaN, infinities and subnormals included
      pointers.push_back(reinterpret_cast<const std::byte*>(row.data()));
      weights.push_back(static_cast<float>(random() % 1000) / 700.0F);
    }
    for (bool weighted : {false, true}) {
      std::vector<std::uint16_t> expected(num_elements);
      for (std::size_t i = 0; i < num_elements; ++i) {
        float acc = 0.0F;
        for (std::size_t r = 0; r < num_rows; ++r) {
          const float value = float_from_bf16(rows[r][i]);
          acc = weighted ? std::fma(weights[r], value, acc) : acc + value;
        }
        expected[i] = expected_bf16(acc);
      }
      for (std::size_t v = 0; v < count; ++v) {
        if (!variants[v].available) continue;
        std::vector<std::uint16_t> out(num_elements, 0xAAAA);
        variants[v].bf16({pointers.data(), weighted ? weights.data() : nullptr, num_rows,
                          reinterpret_cast<std::byte*>(out.data()), num_elements * 2});
        EXPECT_EQ(out, expected) << variants[v].name << ", " << num_rows << " rows, weighted " << weighted;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Lengths, RowSums, testing::Values(8, 16, 24, 128, 136, 392, 7168));

TEST(RowSums, FloatRowsAreSummedWithoutRoundingTwice) {
  const std::vector<float> a = {1.0F, 1e30F, NAN, -0.0F};
  const std::vector<float> b = {0x1p-24F, -1e30F, 1.0F, -0.0F};
  const std::byte* rows[] = {reinterpret_cast<const std::byte*>(a.data()),
                             reinterpret_cast<const std::byte*>(b.data())};
  std::vector<float> out(4);
  choose_row_sum(DType::kFloat32)({rows, nullptr, 2, reinterpret_cast<std::byte*>(out.data()), 16});
  EXPECT_EQ(out[0], 1.0F) << "half an ulp rounds to even";
  EXPECT_EQ(out[1], 0.0F);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(out[2]), 0x7FFFFFFFU);
  EXPECT_FALSE(std::signbit(out[3])) << "sums start from +0";
}

TEST(RowCopy, BothModesCopyEveryByteAndNoMore) {
  for (std::size_t bytes : {16U, 48U, 64U, 80U, 4096U, 14336U}) {
    for (CopyMode mode : {CopyMode::kCached, CopyMode::kStreaming}) {
      alignas(64) static std::byte from[16384];
      alignas(64) static std::byte to[16384];
      for (std::size_t i = 0; i < sizeof(from); ++i) from[i] = static_cast<std::byte>(i * 31 + bytes);
      std::memset(to, 0, sizeof(to));
      copy_row(to + 16, from + 32, bytes, mode);
      finish_copies(mode);
      EXPECT_EQ(std::memcmp(to + 16, from + 32, bytes), 0);
      EXPECT_EQ(to[15], std::byte{0});
      EXPECT_EQ(to[16 + bytes], std::byte{0});
    }
  }
}

}  // namespace
}  // namespace ferry::cpu
