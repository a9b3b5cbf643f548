/// Copies by the driver, over one without GPUs (fake_driver.hpp): which calls are made, and what is reported.

#include <cuda.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "support/net_ends.hpp"
#include "ucx_card/fake_driver.hpp"
#include "ucx_card/gpu_copies.hpp"

namespace ferry::test {
namespace {

using ucx_card::GpuCopies;
using ucx_card::GpuCopyOptions;

constexpr std::size_t kSmall = 4096;
constexpr std::size_t kLarge = 50'000;
constexpr std::chrono::seconds kPatience{30};

template <typename Done>
bool wait_until(Done done) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!done()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

/// Copies between parts of two allocations, and how often each was reported.
class Copies {
 public:
  explicit Copies(const GpuCopyOptions& options, std::size_t count = 1)
      : reports_(count), copies_(GpuCopies::create(options)) {}

  GpuCopies& operator*() { return *copies_; }

  void start(std::size_t index, std::size_t num_bytes) {
    Piece piece{net_pattern(num_bytes, index), std::vector<std::byte>(num_bytes)};
    pieces_.push_back(std::move(piece));
    const Piece& kept = pieces_.back();
    copies_->start(const_cast<std::byte*>(kept.to.data()), kept.from.data(), num_bytes, [this, index](ucs_status_t s) {
      status_ = s;
      ++reports_[index];
    });
  }
  bool is_reported(std::size_t index) const { return reports_[index] == 1; }
  bool all_are_reported() const {
    return std::ranges::all_of(reports_, [](const std::atomic<int>& count) { return count == 1; });
  }
  bool all_have_arrived() const {
    return std::ranges::all_of(pieces_, [](const Piece& piece) { return piece.from == piece.to; });
  }
  ucs_status_t last_status() const { return status_; }

 private:
  struct Piece {
    std::vector<std::byte> from;
    std::vector<std::byte> to;
  };

  std::atomic<ucs_status_t> status_{UCS_INPROGRESS};
  std::deque<Piece> pieces_;
  std::vector<std::atomic<int>> reports_;
  std::unique_ptr<GpuCopies> copies_;
};

/// A driver as new, after the test too.
class Reset {
 public:
  Reset() { reset(); }
  ~Reset() { reset(); }
  Reset(const Reset&) = delete;
  Reset& operator=(const Reset&) = delete;

 private:
  static void reset() {
    FakeDriver& driver = FakeDriver::instance();
    driver.let_pass(~std::size_t{0});
    const std::lock_guard lock(driver.mutex);
    driver.num_copies = driver.num_batches = driver.num_copies_of_batches = 0;
    driver.num_events = driver.num_questions = 0;
    driver.refuses_batches = driver.refuses_copies = driver.fails_events = false;
    driver.on_copy = nullptr;
  }
};

template <typename Value>
Value seen(Value FakeDriver::*member) {
  FakeDriver& driver = FakeDriver::instance();
  const std::lock_guard lock(driver.mutex);
  return driver.*member;
}

template <typename Value>
void set(Value FakeDriver::*member, const Value& value) {
  FakeDriver& driver = FakeDriver::instance();
  const std::lock_guard lock(driver.mutex);
  driver.*member = value;
}

class UcxCardCopies : public testing::TestWithParam<GpuCopyOptions> {
 protected:
  Reset reset_;
};

TEST_P(UcxCardCopies, EachArrivesAndIsReportedOnce) {
  constexpr std::size_t kCount = 100;
  Copies copies(GetParam(), kCount);
  for (std::size_t i = 0; i < kCount; ++i) copies.start(i, i % 3 == 0 ? kLarge + i : 8 + i);
  ASSERT_TRUE(wait_until([&] { return copies.all_are_reported(); }));
  EXPECT_EQ(copies.last_status(), UCS_OK);
  EXPECT_TRUE(copies.all_have_arrived());
  EXPECT_EQ(seen(&FakeDriver::num_events) > 0, GetParam().events);
}

TEST_P(UcxCardCopies, ThoseThatTheDriverRefusesAreReportedAsFailed) {
  Copies copies(GetParam(), 2);
  set(&FakeDriver::refuses_batches, true);
  set(&FakeDriver::refuses_copies, true);
  copies.start(0, 100);
  ASSERT_TRUE(wait_until([&] { return copies.is_reported(0); }));
  EXPECT_EQ(copies.last_status(), UCS_ERR_IO_ERROR);
  set(&FakeDriver::refuses_copies, false);
  // Without batches all goes on by single copies.
  copies.start(1, 100);
  ASSERT_TRUE(wait_until([&] { return copies.is_reported(1); }));
  EXPECT_EQ(copies.last_status(), UCS_OK);
}

TEST_P(UcxCardCopies, TheGpuOfSharedMemoryIsAskedForOnce) {
  constexpr std::size_t kAllocation = 1 << 20;
  Copies copies(GetParam());
  const std::unique_ptr<std::byte, decltype(&std::free)> memory(
      static_cast<std::byte*>(std::aligned_alloc(kAllocation, kAllocation)), &std::free);
  std::byte* const begin = memory.get();
  std::fill(begin, begin + kSmall, std::byte{1});
  ASSERT_EQ((*copies).share(begin + 64), UCS_OK);
  EXPECT_EQ(seen(&FakeDriver::num_questions), 1);
  for (int i = 0; i < 3; ++i) EXPECT_EQ((*copies).copy(begin + kSmall, begin, kSmall), UCS_OK);
  EXPECT_EQ(seen(&FakeDriver::num_questions), 1);
  (*copies).forget(begin + 64);
  EXPECT_EQ((*copies).copy(begin + kSmall, begin, kSmall), UCS_OK);
  EXPECT_EQ(seen(&FakeDriver::num_questions), 2);
  EXPECT_TRUE(std::equal(begin, begin + kSmall, begin + kSmall));
}

INSTANTIATE_TEST_SUITE_P(, UcxCardCopies,
                         testing::Values(GpuCopyOptions{}, GpuCopyOptions{.events = true},
                                         GpuCopyOptions{.small_bytes = kSmall},
                                         GpuCopyOptions{.spins = true, .small_bytes = kSmall, .batches = true},
                                         GpuCopyOptions{.small_bytes = kSmall, .batches = true, .events = true}),
                         [](const auto& instance) {
                           const GpuCopyOptions& options = instance.param;
                           return std::string(options.small_bytes > 0 ? "small" : "one_kind") +
                                  (options.batches ? "_batches" : "") + (options.events ? "_events" : "_words");
                         });

TEST(UcxCardSmallCopies, DoNotWaitForLargeOnes) {
  const Reset reset;
  Copies copies({.small_bytes = kSmall, .batches = true}, 9);
  FakeDriver::instance().let_pass(kSmall);
  for (std::size_t i = 0; i < 8; ++i) copies.start(i, kLarge);
  ASSERT_TRUE(wait_until([] { return seen(&FakeDriver::num_copies) == 8; }));
  copies.start(8, kSmall);
  EXPECT_TRUE(wait_until([&] { return copies.is_reported(8); }));
  for (std::size_t i = 0; i < 8; ++i) EXPECT_FALSE(copies.is_reported(i));
  FakeDriver::instance().let_pass(kLarge);
  EXPECT_TRUE(wait_until([&] { return copies.all_are_reported(); }));
  EXPECT_TRUE(copies.all_have_arrived());
}

#if CUDA_VERSION >= 13000
TEST(UcxCardSmallCopies, ThatAreDueTogetherAreOneCall) {
  const Reset reset;
  constexpr std::size_t kCount = 10;
  Copies copies({.small_bytes = kSmall, .batches = true}, kCount + 1);
  std::atomic<bool> has_begun{false};
  std::atomic<bool> may_go_on{false};
  set(&FakeDriver::on_copy, std::function<void()>([&] {
    has_begun = true;
    (void)wait_until([&] { return may_go_on.load(); });
  }));
  copies.start(kCount, 8);
  ASSERT_TRUE(wait_until([&] { return has_begun.load(); }));
  for (std::size_t i = 0; i < kCount; ++i) copies.start(i, kSmall - i);
  may_go_on = true;
  ASSERT_TRUE(wait_until([&] { return copies.all_are_reported(); }));
  EXPECT_EQ(seen(&FakeDriver::num_batches), 2);
  EXPECT_EQ(seen(&FakeDriver::num_copies_of_batches), static_cast<int>(kCount + 1));
  EXPECT_EQ(seen(&FakeDriver::num_copies), 0);
  EXPECT_TRUE(copies.all_have_arrived());
}
#endif

TEST(UcxCardSmallCopies, FailWhereTheirEventDoes) {
  const Reset reset;
  Copies copies({.small_bytes = kSmall, .events = true});
  set(&FakeDriver::fails_events, true);
  copies.start(0, 8);
  ASSERT_TRUE(wait_until([&] { return copies.is_reported(0); }));
  EXPECT_EQ(copies.last_status(), UCS_ERR_IO_ERROR);
}

}  // namespace
}  // namespace ferry::test
