/// Copies for cards, over a driver without GPUs (fake_driver.hpp): what copies them, and what is reported.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "support/net_ends.hpp"
#include "ucx_card/fake_driver.hpp"
#include "ucx_card/gpu_copies.hpp"

namespace ferry::test {
namespace {

using ucx_card::GpuCopies;

constexpr std::size_t kAllocation = 1 << 20;
constexpr std::size_t kBytes = 400;
constexpr std::size_t kCount = 1000;  // more than a mover has under way
constexpr std::chrono::seconds kPatience{30};

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
    const std::lock_guard lock(driver.mutex);
    driver.num_copies = driver.num_questions = driver.num_launches = 0;
    driver.refuses_copies = driver.refuses_launches = driver.has_kernels = false;
    driver.max_commands = ~std::uint64_t{0};
    driver.max_looks = 1000;
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

/// Copies from the lower half of an allocation to the upper one, and how often each was reported.
class Copies {
 public:
  Copies()
      : memory_(static_cast<std::byte*>(std::aligned_alloc(kAllocation, kAllocation)), &std::free),
        copies_(GpuCopies::create()) {
    std::ranges::copy(net_pattern(kAllocation / 2, 1), memory_.get());
    std::fill_n(memory_.get() + kAllocation / 2, kAllocation / 2, std::byte{0});
  }

  GpuCopies& operator*() { return *copies_; }
  std::byte* begin() { return memory_.get(); }

  void start(std::size_t index) {
    std::byte* const from = memory_.get() + index * kBytes;
    copies_->start(from + kAllocation / 2, from, kBytes, [this, index](ucs_status_t status) {
      status_ = status;
      ++reports_[index];
    });
  }
  void start_all() {
    for (std::size_t i = 0; i < kCount; ++i) start(i);
  }
  /// False: it took too long.
  bool finish() {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (copies_->poll()) {
      if (std::chrono::steady_clock::now() >= deadline) return false;
      std::this_thread::yield();
    }
    return true;
  }
  bool all_are_reported_once() const {
    return std::ranges::all_of(reports_, [](int count) { return count == 1; });
  }
  bool all_have_arrived() const {
    return std::equal(memory_.get(), memory_.get() + kCount * kBytes, memory_.get() + kAllocation / 2);
  }
  ucs_status_t last_status() const { return status_; }
  /// Ends the object that copies; the next one has nothing to do.
  void end() {
    copies_.reset();
    copies_ = GpuCopies::create();
  }

 private:
  std::unique_ptr<std::byte, decltype(&std::free)> memory_;
  ucs_status_t status_ = UCS_INPROGRESS;
  std::vector<int> reports_ = std::vector<int>(kCount);
  std::unique_ptr<GpuCopies> copies_;
};

TEST(UcxCardDriverCopies, EachArrivesAndIsReportedOnce) {
  const Reset reset;
  Copies copies;
  copies.start_all();
  ASSERT_TRUE(copies.finish());
  EXPECT_EQ(copies.last_status(), UCS_OK);
  EXPECT_TRUE(copies.all_are_reported_once());
  EXPECT_TRUE(copies.all_have_arrived());
  EXPECT_EQ(seen(&FakeDriver::num_copies), static_cast<int>(kCount));
}

TEST(UcxCardDriverCopies, ThoseThatTheDriverRefusesAreReportedAsFailed) {
  const Reset reset;
  Copies copies;
  set(&FakeDriver::refuses_copies, true);
  copies.start(0);
  EXPECT_EQ(copies.last_status(), UCS_ERR_IO_ERROR);
  set(&FakeDriver::refuses_copies, false);
  copies.start(1);
  ASSERT_TRUE(copies.finish());
  EXPECT_EQ(copies.last_status(), UCS_OK);
}

TEST(UcxCardDriverCopies, TheGpuOfSharedMemoryIsAskedForOnce) {
  const Reset reset;
  Copies copies;
  std::byte* const begin = copies.begin();
  ASSERT_EQ((*copies).share(begin + 64), UCS_OK);
  EXPECT_EQ(seen(&FakeDriver::num_questions), 1);
  for (int i = 0; i < 3; ++i) EXPECT_EQ((*copies).copy(begin + kBytes, begin, kBytes), UCS_OK);
  EXPECT_EQ(seen(&FakeDriver::num_questions), 1);
  (*copies).forget(begin + 64);
  EXPECT_EQ((*copies).copy(begin + kBytes, begin, kBytes), UCS_OK);
  EXPECT_EQ(seen(&FakeDriver::num_questions), 2);
  EXPECT_TRUE(std::equal(begin, begin + kBytes, begin + kBytes));
}

class UcxCardMover : public testing::Test {
 protected:
  UcxCardMover() {
    set(&FakeDriver::has_kernels, true);
    EXPECT_EQ((*copies_).share(copies_.begin()), UCS_OK);
  }
  // Memory of later tests may be at the same place.
  void TearDown() override { (*copies_).forget(copies_.begin()); }

  Reset reset_;
  Copies copies_;
};

TEST_F(UcxCardMover, CopiesAllBetweenSharedMemory) {
  copies_.start_all();
  ASSERT_TRUE(copies_.finish());
  EXPECT_EQ(copies_.last_status(), UCS_OK);
  EXPECT_TRUE(copies_.all_are_reported_once());
  EXPECT_TRUE(copies_.all_have_arrived());
  EXPECT_EQ(seen(&FakeDriver::num_copies), 0);
  EXPECT_GT(seen(&FakeDriver::num_launches), 0);
}

TEST_F(UcxCardMover, LosesNoCommandWhereItsKernelEndsBetweenThem) {
  set(&FakeDriver::max_commands, std::uint64_t{3});
  copies_.start_all();
  ASSERT_TRUE(copies_.finish());
  EXPECT_EQ(copies_.last_status(), UCS_OK);
  EXPECT_TRUE(copies_.all_are_reported_once());
  EXPECT_TRUE(copies_.all_have_arrived());
  EXPECT_GE(seen(&FakeDriver::num_launches), static_cast<int>(kCount / 3));
}

TEST_F(UcxCardMover, LosesNoCommandThatComesAsItsKernelEnds) {
  set(&FakeDriver::max_looks, std::uint64_t{1});
  for (std::size_t i = 0; i < kCount; ++i) {
    copies_.start(i);
    ASSERT_TRUE(copies_.finish());
  }
  EXPECT_TRUE(copies_.all_are_reported_once());
  EXPECT_TRUE(copies_.all_have_arrived());
}

TEST_F(UcxCardMover, EndsAfterAllItsCopies) {
  copies_.start_all();
  copies_.end();
  EXPECT_TRUE(copies_.all_are_reported_once());
  EXPECT_TRUE(copies_.all_have_arrived());
}

TEST_F(UcxCardMover, ReportsAllAsFailedWhereItsKernelCannotRun) {
  set(&FakeDriver::refuses_launches, true);
  copies_.start_all();
  EXPECT_FALSE((*copies_).poll());
  EXPECT_EQ(copies_.last_status(), UCS_ERR_IO_ERROR);
  EXPECT_TRUE(copies_.all_are_reported_once());
}

}  // namespace
}  // namespace ferry::test
