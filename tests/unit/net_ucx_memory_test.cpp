/// Memory that closed ends leave in their process, which the address sanitizer's leak check does not report
/// (tests/leaks.supp).

#include <gtest/gtest.h>

#include <cstddef>

#include "support/net_ends.hpp"
#include "support/process_usage.hpp"

namespace ferry::test {
namespace {

/// Three ends exchange messages, one leaves, and the others notice and leave too.
void come_and_go(bool engine_allocates) {
  NetEnds ends("ucx", {.num_ends = 3, .engine_allocates = engine_allocates});
  ends.connect();
  for (int from = 0; from < 3; ++from) {
    ends[from].engine->put((from + 1) % 3, 0, 0, 1 << 15, 1 << 15);
    for (int to = 0; to < 3; ++to) {
      if (to != from) ends[from].engine->notify(to, 0, 1);
    }
  }
  ASSERT_TRUE(ends.poll_until([&ends] {
    for (int end = 0; end < 3; ++end) {
      if (ends[end].highest((end + 1) % 3, 0) != 1 || ends[end].highest((end + 2) % 3, 0) != 1) return false;
    }
    return true;
  }));
  ends.close({2});
  ASSERT_TRUE(ends.poll_until([&ends] { return ends[0].lost.contains(2) && ends[1].lost.contains(2); }));
}

TEST(NetUcxMemory, IsGivenBackByEndsThatHaveClosed) {
  constexpr int kNumRounds = 20;
  for (int i = 0; i < 4; ++i) come_and_go(i % 2 == 0);
  const ProcessUsage warm = process_usage();
  for (int i = 0; i < kNumRounds; ++i) come_and_go(i % 2 == 0);
  const ProcessUsage now = process_usage();
  // A worker that is not destroyed holds 107 KiB (UCX 1.13) and nine descriptors. Sanitizers count no bytes.
  constexpr std::size_t kSpareBytes = 16 << 10;
  EXPECT_LE(now.heap_bytes, warm.heap_bytes + kSpareBytes);
  EXPECT_LE(now.new_bytes, warm.new_bytes + kSpareBytes);
  EXPECT_LE(now.num_descriptors, warm.num_descriptors);
}

}  // namespace
}  // namespace ferry::test
