/// Memory that is kept for the next call.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "cuda/latency/kept_allocator.hpp"
#include "cuda/memory/pinned_memory.hpp"
#include "node/page_heap.hpp"

namespace ferry::test {
namespace {

constexpr std::size_t kPage = node::kPageBytes;

struct Kept {
  std::vector<int> values = std::vector<int>(8, 1);
  char rest[2000] = {};
};

TEST(KeptAllocator, TheNextObjectTakesTheMemoryOfTheLast) {
  const cuda::KeptAllocator<Kept> allocator;
  auto first = std::allocate_shared<Kept>(allocator);
  auto second = std::allocate_shared<Kept>(allocator);
  const void* const place = second.get();
  EXPECT_NE(first.get(), second.get());
  second->values.clear();
  second.reset();
  second = std::allocate_shared<Kept>(allocator);
  EXPECT_EQ(second.get(), place);
  EXPECT_EQ(second->values.size(), 8U) << "a new object";
}

TEST(KeptAllocator, ManyObjectsAtATime) {
  const cuda::KeptAllocator<Kept> allocator;
  std::vector<std::shared_ptr<Kept>> all;
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 200; ++i) all.push_back(std::allocate_shared<Kept>(allocator));
    for (int i = 0; i < 200; ++i)
      std::memset(all[static_cast<std::size_t>(i)]->rest, i % 100 + round, sizeof(Kept::rest));
    for (int i = 0; i < 200; ++i) {
      const auto& rest = all[static_cast<std::size_t>(i)]->rest;
      EXPECT_TRUE(std::ranges::all_of(rest, [&](char byte) { return byte == i % 100 + round; })) << "object " << i;
    }
    all.clear();
  }
}

TEST(PinnedMemory, PagesThatWereGivenBackAreOneBlockAgain) {
  const std::shared_ptr<cuda::PinnedMemory> memory = cuda::PinnedMemory::create().value();
  std::vector<std::byte*> pages;
  for (Result<std::byte*> page = memory->take(kPage); page.ok(); page = memory->take(kPage)) pages.push_back(*page);
  ASSERT_GT(pages.size(), 2U);
  EXPECT_EQ(memory->take(kPage).status().code(), ErrorCode::kCapacity);
  std::byte* const last = pages.back();
  memory->give(last, 100);
  const Result<std::byte*> again = memory->take(kPage);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(*again, last);
  EXPECT_EQ(static_cast<int>(last[0]), 0);
  for (std::byte* const page : pages) memory->give(page, kPage);
  const Result<std::byte*> whole = memory->take(pages.size() * kPage);
  ASSERT_TRUE(whole.ok()) << whole.status().message();
  memory->give(*whole, pages.size() * kPage);
}

}  // namespace
}  // namespace ferry::test
