#include "core/call_gate.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>
#include <vector>

namespace ferry::test {
namespace {

TEST(CallGate, LetsCallsInOneAfterTheOther) {
  constexpr int kThreads = 4;
  constexpr int kCalls = 2000;
  CallGate gate;
  int num_calls = 0;  // correct only if no two calls run at once
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&gate, &num_calls] {
        for (int call = 0; call < kCalls; ++call) {
          CallPass pass;
          if (pass.wait_for(gate)) ++num_calls;
        }
      });
    }
  }
  EXPECT_EQ(num_calls, kThreads * kCalls);
}

TEST(CallGate, SaysWhetherACallRuns) {
  CallGate gate;
  bool while_held = true;
  {
    CallPass held;
    ASSERT_TRUE(held.wait_for(gate));
    std::jthread([&gate, &while_held] { while_held = CallPass().try_take(gate); }).join();
  }
  EXPECT_FALSE(while_held);
  EXPECT_TRUE(CallPass().try_take(gate));
}

TEST(CallGate, LetsNoCallInFromWithinACall) {
  CallGate gate;
  {
    CallPass outer;
    ASSERT_TRUE(outer.wait_for(gate));
    EXPECT_FALSE(CallPass().wait_for(gate));
    EXPECT_FALSE(CallPass().try_take(gate));
  }
  EXPECT_TRUE(CallPass().wait_for(gate));
}

TEST(CallGate, IsACopyInAForkedProcess) {
  const CallGate gate;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const CallGate of_its_own;
    _exit(gate.is_copy() && !of_its_own.is_copy() ? 0 : 1);
  }
  int ended = -1;
  ASSERT_EQ(waitpid(child, &ended, 0), child);
  EXPECT_EQ(ended, 0);
  EXPECT_FALSE(gate.is_copy());
}

}  // namespace
}  // namespace ferry::test
