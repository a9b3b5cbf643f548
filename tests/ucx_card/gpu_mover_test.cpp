/// Copies between real GPUs by the kernel of a card: inside the first one, and from and to the second one.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cuda/memory/card_memory.hpp"
#include "support/net_ends.hpp"
#include "ucx_card/gpu_copies.hpp"
#include "ucx_card/gpu_mover.hpp"
#include "ucx_card/sleep.hpp"

namespace ferry::test {
namespace {

using ucx_card::Driver;
using ucx_card::GpuCopies;
using ucx_card::GpuMover;

constexpr std::size_t kBytes = std::size_t{8} << 20;
constexpr std::chrono::seconds kPatience{30};
constexpr std::chrono::milliseconds kIdle{5};  // longer than the kernel stays without work

struct Way {
  int from = 0;
  int to = 0;
};
void PrintTo(const Way& way, std::ostream* out) { *out << "GPU " << way.from << " to GPU " << way.to; }

/// Memory of two GPUs, or of one twice, and what the second one's should hold.
class UcxCardGpuMover : public testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    copies_ = GpuCopies::create();
    receiver_ = GpuCopies::create();
    ASSERT_NE(copies_, nullptr);
    int num_gpus = 0;
    ASSERT_EQ(Driver::load()->device_count(&num_gpus), CUDA_SUCCESS);
    // A host with one GPU has copies inside it alone.
    const auto on = [num_gpus](int gpu) { return std::min(gpu, num_gpus - 1); };
    ASSERT_NE(GpuMover::create(*Driver::load(), on(GetParam().from)), nullptr);
    for (const int gpu : {on(GetParam().from), on(GetParam().to)}) {
      auto memory = cuda::take_card_memory(gpu, kBytes);
      ASSERT_TRUE(memory.ok()) << memory.status().to_string();
      ASSERT_EQ((memory_.empty() ? copies_ : receiver_)->share(memory->get()), UCS_OK);
      memory_.push_back(*memory);
    }
    pattern_ = net_pattern(kBytes, 7);
    wanted_.assign(kBytes, std::byte{0});
    ASSERT_EQ(copies_->copy(from(), pattern_.data(), kBytes), UCS_OK);
    ASSERT_EQ(copies_->copy(to(), wanted_.data(), kBytes), UCS_OK);
  }
  void TearDown() override {
    for (const auto& memory : memory_) copies_->forget(memory.get());
    copies_.reset();
    receiver_.reset();
  }

  std::byte* from() const { return memory_.front().get(); }
  std::byte* to() const { return memory_.back().get(); }

  void start(std::size_t to_offset, std::size_t from_offset, std::size_t num_bytes) {
    std::copy_n(pattern_.begin() + static_cast<std::ptrdiff_t>(from_offset), num_bytes,
                wanted_.begin() + static_cast<std::ptrdiff_t>(to_offset));
    ++num_started_;
    copies_->start(to() + to_offset, from() + from_offset, num_bytes, [this](ucs_status_t status) {
      if (status == UCS_OK) ++num_ended_;
    });
  }
  /// Begins to store a word behind all copies so far, at a time.
  void start_word(std::size_t offset, std::uint64_t word, std::uint64_t at_ns) {
    std::memcpy(wanted_.data() + offset, &word, sizeof word);
    ++num_started_;
    ASSERT_TRUE(copies_->start_word(to() + offset, word, at_ns, [this, at_ns](ucs_status_t status) {
      if (status != UCS_OK) return;
      ++num_ended_;
      late_ns_.push_back(static_cast<std::int64_t>(ucx_card::now_ns() - at_ns));
    }));
  }
  /// False: not all have ended well, in time.
  bool finish() {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (copies_->poll() && std::chrono::steady_clock::now() < deadline) {
    }
    return num_ended_ == num_started_;
  }
  /// Also that nothing else was written.
  bool has_arrived() {
    std::vector<std::byte> seen(kBytes);
    return copies_->copy(seen.data(), to(), kBytes) == UCS_OK && seen == wanted_;
  }

  std::vector<std::int64_t> late_ns_;  ///< of words, as the host learns it

 private:
  std::vector<std::shared_ptr<std::byte>> memory_;
  std::vector<std::byte> pattern_;
  std::vector<std::byte> wanted_;
  std::size_t num_started_ = 0;
  std::size_t num_ended_ = 0;
  std::unique_ptr<GpuCopies> copies_;
  std::unique_ptr<GpuCopies> receiver_;  // has the other memory
};

TEST_P(UcxCardGpuMover, CopiesEverySizeAtEveryAlignment) {
  using Sizes = std::vector<std::size_t>;
  constexpr std::size_t kApart = 512;
  for (const std::size_t num_bytes :
       Sizes{1, 3, 4, 8, 15, 16, 17, 100, 4096, 16384, 16385, 70'001, 133'120, 1'048'576}) {
    for (const std::size_t to_shift : Sizes{0, 1, 4, 8, 15}) {
      std::size_t at = kApart;
      for (const std::size_t from_shift : Sizes{0, 1, 4, 8, 12}) {
        start(at + to_shift, kApart + from_shift, num_bytes);
        at += num_bytes / kApart * kApart + 2 * kApart;
      }
      ASSERT_TRUE(finish());
    }
    ASSERT_TRUE(has_arrived()) << num_bytes << " bytes";
  }
}

TEST_P(UcxCardGpuMover, CopiesAThousandAtOnce) {
  constexpr std::size_t kCount = 1000;
  constexpr std::size_t kPart = kBytes / kCount;
  for (std::size_t i = 0; i < kCount; ++i) start(i * kPart, (kCount - 1 - i) * kPart, kPart - i);
  EXPECT_TRUE(finish());
  EXPECT_TRUE(has_arrived());
}

TEST_P(UcxCardGpuMover, CopiesLargeAndSmallOnesAtOnce) {
  constexpr std::size_t kCount = 100;
  constexpr std::size_t kPart = kBytes / kCount / 16 * 16;
  for (std::size_t i = 0; i < kCount; ++i) start(i * kPart, 0, i % 2 == 0 ? kPart : 64);
  EXPECT_TRUE(finish());
  EXPECT_TRUE(has_arrived());
}

TEST_P(UcxCardGpuMover, GoesOnAfterItsKernelHasEnded) {
  constexpr std::size_t kPart = 20'000;
  for (std::size_t i = 0; i < 20; ++i) {
    start(i * kPart, (i + 1) * kPart, kPart);
    ASSERT_TRUE(finish());
    std::this_thread::sleep_for(kIdle);
  }
  EXPECT_TRUE(has_arrived());
}

TEST_P(UcxCardGpuMover, LosesNoCommandAroundTheEndOfItsKernel) {
  // Pauses around the time after which it ends.
  for (std::size_t i = 0; i < 400; ++i) {
    start(i * 64, i * 128, 64);
    ASSERT_TRUE(finish());
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(900 + i);
    while (std::chrono::steady_clock::now() < end) {
    }
  }
  EXPECT_TRUE(has_arrived());
}

TEST_P(UcxCardGpuMover, StoresWordsAtTheirTimeBehindTheCopiesBefore) {
  constexpr std::size_t kCount = 1000;
  constexpr std::uint64_t kAheadNs = 10'000;
  for (std::size_t i = 0; i < kCount; ++i) {
    start(4096, i * 64, 64);
    start_word(i * 8 % 4096, i, ucx_card::now_ns() + kAheadNs);
    ASSERT_TRUE(finish());
  }
  EXPECT_TRUE(has_arrived());
  std::ranges::sort(late_ns_);
  ASSERT_EQ(late_ns_.size(), kCount);
  EXPECT_GE(late_ns_.front(), 0);
  RecordProperty("median_late_ns", static_cast<int>(late_ns_[kCount / 2]));
}

INSTANTIATE_TEST_SUITE_P(, UcxCardGpuMover, testing::Values(Way{0, 0}, Way{0, 1}, Way{1, 0}), [](const auto& instance) {
  return fmt::format("gpu_{}_to_{}", instance.param.from, instance.param.to);
});

}  // namespace
}  // namespace ferry::test
