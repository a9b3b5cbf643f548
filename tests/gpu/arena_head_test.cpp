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
constexpr std::size_t kBytes = 8192;  // less than the granularity of the memory

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
    begin_arena();
  }

  static std::shared_ptr<cuda::DeviceArena> make_arena(cuda::MemoryPath path) {
    return cuda::DeviceArena::create(kDevice, kArenaBytes, path, cuda::OwnStream::create().value(), kBytes).value();
  }
  void begin_arena() {
    arena_ = make_arena(cuda::MemoryPath::kVmm);
    data_ = arena_->take(kBytes).value();
    ASSERT_EQ(data_, arena_->base());
    arena_->seal_head();
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
  ASSERT_TRUE(arena_->renew_head().ok());
  fill(former->base(), std::byte{2});
  EXPECT_EQ(read(data_), std::vector<std::byte>(kBytes, std::byte{0}));
  const auto now = map();
  fill(now->base(), std::byte{3});
  EXPECT_EQ(read(data_), std::vector<std::byte>(kBytes, std::byte{3}));
  EXPECT_EQ(read(former->base()), std::vector<std::byte>(kBytes, std::byte{2}));
}

TEST_F(ArenaHead, KeepsWhatIsTakenBehindIt) {
  EXPECT_EQ(arena_->allocated_bytes(), kBytes);
  EXPECT_EQ(arena_->largest_free_bytes(), kArenaBytes - kBytes);
  std::byte* const page = arena_->take(kBytes).value();
  std::byte* const more = arena_->take(std::size_t{32} << 20).value();
  fill(page, std::byte{4});
  fill(more, std::byte{4});
  for (int round = 0; round < 3; ++round) ASSERT_TRUE(arena_->renew_head().ok());
  EXPECT_EQ(read(page), std::vector<std::byte>(kBytes, std::byte{4}));
  EXPECT_EQ(read(more), std::vector<std::byte>(kBytes, std::byte{4}));
}

TEST_F(ArenaHead, APlaceTakesAnotherArena) {
  const auto place = map();
  std::byte* const base = place->base();
  place->clear();
  ASSERT_TRUE(place->stand_in(std::size_t{16} << 20).ok());
  fill(base + (std::size_t{16} << 20) - kBytes, std::byte{5});
  fill(base, std::byte{5});
  EXPECT_EQ(read(base), std::vector<std::byte>(kBytes, std::byte{5}));
  place->clear();
  begin_arena();
  fill(data_, std::byte{6});
  ASSERT_TRUE(arena_->set_announce([&](const cuda::ArenaChunk& chunk) { return place->add(chunk); }).ok());
  EXPECT_EQ(place->base(), base);
  EXPECT_EQ(read(base), std::vector<std::byte>(kBytes, std::byte{6}));
  EXPECT_TRUE(arena_->set_announce(nullptr).ok());
}

TEST_F(ArenaHead, OfMemoryWithAddressesThatChangeIsNotRenewed) {
  const auto arena = make_arena(cuda::MemoryPath::kIpc);
  EXPECT_EQ(arena->renew_head().code(), ErrorCode::kUnsupported);
}

}  // namespace
}  // namespace ferry::test
