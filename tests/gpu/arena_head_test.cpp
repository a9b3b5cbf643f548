/// Memory of a group that is renewed: the part that other ranks write is replaced at the same addresses.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "cuda/memory/device_arena.hpp"
#include "cuda/memory/peer_mapping.hpp"

namespace ferry::test {
namespace {

constexpr int kDevice = 0;
constexpr std::size_t kArenaBytes = std::size_t{64} << 20;
constexpr std::size_t kClearedBytes = 4096;  // less than the granularity of the memory
constexpr std::size_t kBytes = 2 * kClearedBytes;

std::vector<std::byte> read(const std::byte* from) {
  std::vector<std::byte> bytes(kBytes);
  EXPECT_EQ(cudaMemcpy(bytes.data(), from, kBytes, cudaMemcpyDeviceToHost), cudaSuccess);
  return bytes;
}

void fill(std::byte* to, std::byte value) {
  ASSERT_EQ(cudaMemset(to, std::to_integer<int>(value), kBytes), cudaSuccess);
}

class ArenaHead : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(cudaSetDevice(kDevice), cudaSuccess);
    if (cuda::choose_memory_path(kDevice).value() != cuda::MemoryPath::kVmm) {
      GTEST_SKIP() << "this machine's GPUs do not share memory as file descriptors";
    }
    arena_ = make_arena(cuda::MemoryPath::kVmm);
    ASSERT_TRUE(arena_->back_head(kBytes).ok());
    data_ = arena_->take(kBytes).value();
    ASSERT_EQ(data_, arena_->base());
  }

  static std::shared_ptr<cuda::DeviceArena> make_arena(cuda::MemoryPath path) {
    return cuda::DeviceArena::create(kDevice, kArenaBytes, path, cuda::OwnStream::create().value()).value();
  }

  /// The arena as a process maps it that was given its chunks.
  std::unique_ptr<cuda::PeerMapping> map() {
    auto mapping = cuda::PeerMapping::create(kDevice, cuda::MemoryPath::kVmm, arena_->size_bytes()).value();
    EXPECT_TRUE(arena_->set_announce([&](const cuda::ArenaChunk& chunk) { return mapping->add(chunk); }).ok());
    EXPECT_TRUE(arena_->set_announce(nullptr).ok());
    return mapping;
  }

  std::shared_ptr<cuda::DeviceArena> arena_;
  std::byte* data_ = nullptr;
};

TEST_F(ArenaHead, IsOutOfReachOfThoseThatMapTheFormerMemory) {
  const auto former = map();
  fill(data_, std::byte{1});
  ASSERT_EQ(read(former->base()), std::vector<std::byte>(kBytes, std::byte{1}));
  ASSERT_TRUE(arena_->renew_head(kClearedBytes).ok());
  fill(former->base(), std::byte{2});

  std::vector<std::byte> expected(kClearedBytes, std::byte{0});
  expected.resize(kBytes, std::byte{1});  // the rest of the head keeps its contents
  EXPECT_EQ(read(data_), expected);
  const auto now = map();
  fill(now->base(), std::byte{3});
  EXPECT_EQ(read(data_), std::vector<std::byte>(kBytes, std::byte{3}));
  EXPECT_EQ(read(former->base()), std::vector<std::byte>(kBytes, std::byte{2}));
}

TEST_F(ArenaHead, KeepsTheMemoryBehindIt) {
  std::byte* const behind = arena_->take(std::size_t{32} << 20).value();
  fill(behind, std::byte{4});
  for (int round = 0; round < 3; ++round) ASSERT_TRUE(arena_->renew_head(kClearedBytes).ok());
  EXPECT_EQ(read(behind), std::vector<std::byte>(kBytes, std::byte{4}));
}

TEST_F(ArenaHead, APlaceTakesAnotherArena) {
  const auto place = map();
  std::byte* const base = place->base();
  place->clear();
  ASSERT_TRUE(place->stand_in(kBytes).ok());
  fill(base, std::byte{5});
  EXPECT_EQ(read(base), std::vector<std::byte>(kBytes, std::byte{5}));
  place->clear();
  arena_ = make_arena(cuda::MemoryPath::kVmm);
  ASSERT_TRUE(arena_->back_head(kBytes).ok());
  data_ = arena_->take(kBytes).value();
  fill(data_, std::byte{6});
  ASSERT_TRUE(arena_->set_announce([&](const cuda::ArenaChunk& chunk) { return place->add(chunk); }).ok());
  EXPECT_EQ(place->base(), base);
  EXPECT_EQ(read(base), std::vector<std::byte>(kBytes, std::byte{6}));
  EXPECT_TRUE(arena_->set_announce(nullptr).ok());
}

TEST_F(ArenaHead, OfMemoryWithAddressesThatChangeIsNotRenewed) {
  const auto arena = make_arena(cuda::MemoryPath::kIpc);
  EXPECT_TRUE(arena->back_head(kBytes).ok());
  EXPECT_EQ(arena->renew_head(kClearedBytes).code(), ErrorCode::kUnsupported);
}

}  // namespace
}  // namespace ferry::test
