// What the wheels bring along for C libraries before 2.30 (scripts/wheels/glibc.c), compiled with a dlsym that finds
// nothing, as there.
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace {
int num_searches = 0;
}

extern "C" void* find_nothing(void* /*library*/, const char* /*name*/) {
  ++num_searches;
  return nullptr;
}

namespace {

using std::chrono::steady_clock;

TEST(OldGlibc, WaitEndsAtItsDeadlineOnTheSteadyClock) {
  std::mutex mutex;
  std::condition_variable condition;
  std::unique_lock lock(mutex);
  const steady_clock::time_point deadline = steady_clock::now() + std::chrono::milliseconds(20);
  // One wait, not a loop: a wait that ended early would say so.
  EXPECT_EQ(condition.wait_until(lock, deadline), std::cv_status::timeout);
  EXPECT_GT(num_searches, 0) << "the C library's own function was called";
}

TEST(OldGlibc, WaitEndsWhenItIsNotified) {
  std::mutex mutex;
  std::condition_variable condition;
  bool done = false;
  std::unique_lock lock(mutex);
  std::thread other([&] {
    const std::scoped_lock locked(mutex);
    done = true;
    condition.notify_one();
  });
  EXPECT_TRUE(condition.wait_until(lock, steady_clock::now() + std::chrono::hours(1), [&] { return done; }));
  lock.unlock();
  other.join();
}

TEST(OldGlibc, DeadlineInThePastEndsAtOnce) {
  std::mutex mutex;
  std::condition_variable condition;
  std::unique_lock lock(mutex);
  EXPECT_EQ(condition.wait_until(lock, steady_clock::now() - std::chrono::seconds(5)), std::cv_status::timeout);
}

}  // namespace
