/// Parts of the CPU backend on their own: the page heap, the arena, row copies. row_sum_test.cpp tests the sums.

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "cpu/rows/row_copy.hpp"
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
