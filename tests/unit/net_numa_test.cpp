/// Memory and processors near a GPU, on hosts that are trees of files, and a thread that keeps to some processors.

#include "net/numa.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "ferry/ferry.hpp"
#include "net/engine.hpp"
#include "net/proxy.hpp"
#include "support/rank_runner.hpp"

namespace ferry::net {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// /sys of a host with two NUMA nodes of four processors each, and one of memory alone.
class NumaHost : public ::testing::Test {
 protected:
  NumaHost() {
    std::string pattern = (std::filesystem::temp_directory_path() / "ferry-test-XXXXXX").string();
    sys_ = mkdtemp(pattern.data());
    write("devices/system/node/node0/cpulist", "0-1,4-5\n");
    write("devices/system/node/node1/cpulist", "2-3,6-7\n");
    write("devices/system/node/node2/cpulist", "\n");
    write("devices/system/node/node3/cpulist", "2-x\n");
    write("bus/pci/devices/0000:1b:00.0/numa_node", "1\n");
    write("bus/pci/devices/0000:1c:00.0/numa_node", "-1\n");
  }
  ~NumaHost() override { std::filesystem::remove_all(sys_); }

  void write(const std::string& file, const std::string& text) const {
    std::filesystem::create_directories((sys_ / file).parent_path());
    std::ofstream(sys_ / file) << text;
  }

  std::filesystem::path sys_;
  const std::vector<int> all_{0, 1, 2, 3, 4, 5, 6, 7};
};

TEST_F(NumaHost, AGpuHasTheNodeThatTheSystemTells) {
  EXPECT_EQ(numa_node_of("0000:1B:00.0", sys_), 1);
  for (const char* unknown : {"0000:1c:00.0", "0000:77:00.0", ""})
    EXPECT_EQ(numa_node_of(unknown, sys_), -1) << unknown;
}

TEST_F(NumaHost, ANodeHasProcessorsAmongThoseAllowed) {
  EXPECT_THAT(cpus_of_node(0, all_, sys_), ElementsAre(0, 1, 4, 5));
  EXPECT_THAT(cpus_of_node(1, all_, sys_), ElementsAre(2, 3, 6, 7));
  EXPECT_THAT(cpus_of_node(1, std::vector<int>{0, 1, 2, 6, 9}, sys_), ElementsAre(2, 6));
}

TEST_F(NumaHost, ASingleProcessorIsLeftToOtherThreads) {
  EXPECT_THAT(cpus_of_node(1, std::vector<int>{0, 1, 2}, sys_), IsEmpty());
  EXPECT_THAT(cpus_of_node(1, std::vector<int>{0, 1}, sys_), IsEmpty());
}

TEST_F(NumaHost, WhatTheSystemDoesNotTellIsNotGuessed) {
  for (const int node : {-1, 2, 3, 4}) EXPECT_THAT(cpus_of_node(node, all_, sys_), IsEmpty()) << node;
}

TEST(CpuList, HasRangesAndNumbers) {
  EXPECT_THAT(*parse_cpu_list("0-3,8,10-11"), ElementsAre(0, 1, 2, 3, 8, 10, 11));
  EXPECT_THAT(*parse_cpu_list("7"), ElementsAre(7));
  EXPECT_THAT(*parse_cpu_list(""), IsEmpty());
  for (const char* malformed :
       {"a", "1-", "-1", "3-1", "1,", ",1", "1,,2", "1 2", "0-99999", "4294967296", "0-3-5", "0x1"}) {
    EXPECT_FALSE(parse_cpu_list(malformed).has_value()) << malformed;
  }
}

/// An engine on which nothing happens but the event that the proxy wakes its rank for.
class QuietEngine final : public Engine {
 public:
  std::string_view name() const override { return "quiet"; }
  std::span<std::byte> memory() const override { return {}; }
  Result<Blob> address() const override { return Blob{}; }
  Status connect(std::span<const Blob> /*addresses*/, EngineEvents events) override {
    events_ = std::move(events);
    return {};
  }
  void put(int, int, std::size_t, std::size_t, std::size_t) override {}
  void notify(int peer, int channel, std::uint64_t value) override { events_.notified(peer, channel, value); }
  void put_from(int, int, std::span<const std::byte>, std::size_t) override {}
  void get(int, std::span<std::byte>, std::size_t, std::uint64_t) override {}
  void atomic(int, int, const AtomicOp&, std::uint64_t) override {}
  void flush(int, std::uint64_t) override {}
  void forget(std::uint64_t) override {}
  bool poll() override { return false; }
  bool flushed(int) const override { return true; }
  int event_fd() const override { return -1; }
  bool arm() override { return true; }
  std::vector<Path> paths() const override { return {}; }
  void limit_close_time(std::int64_t /*timeout_ns*/) override {}
  void close() override {}

 private:
  EngineEvents events_;
};

/// Processors that the thread of a proxy may run on.
std::vector<int> cpus_of_proxy(std::vector<int> cpus) {
  std::promise<std::vector<int>> seen;
  const EngineOptions options{.self = 0, .num_peers = 2, .num_channels = 1, .memory = {}, .timeout_ns = 0};
  Proxy proxy(std::make_unique<QuietEngine>(), options, [&seen, told = false]() mutable {
    if (!std::exchange(told, true)) seen.set_value(allowed_cpus());
  });
  proxy.run_on(std::move(cpus));
  if (!proxy.start(std::vector<Blob>(2)).ok()) return {};
  proxy.notify(1, 0, 1);
  return seen.get_future().get();
}

TEST(ProxyThread, KeepsToItsProcessors) {
  const std::vector<int> allowed = allowed_cpus();
  ASSERT_FALSE(allowed.empty());
  EXPECT_EQ(cpus_of_proxy({}), allowed);
  EXPECT_THAT(cpus_of_proxy({allowed.back()}), ElementsAre(allowed.back()));
  EXPECT_EQ(allowed_cpus(), allowed) << "the thread that starts it stays as it is";
}

int memory_policy() {
  int policy = -1;
  return syscall(SYS_get_mempolicy, &policy, nullptr, 0UL, nullptr, 0UL) == 0 ? policy : -1;
}

TEST(PreferNode, LastsAsLongAsItLivesWhereItIsPermitted) {
  constexpr unsigned long kFirstNode = 1;
  constexpr unsigned long kNumBits = 64;
  const int before = memory_policy();
  const bool permitted =
      before == MPOL_DEFAULT && syscall(SYS_set_mempolicy, MPOL_PREFERRED, &kFirstNode, kNumBits) == 0;
  if (permitted) {
    {
      const PreferNode prefer(0);
      EXPECT_EQ(memory_policy(), MPOL_PREFERRED);
    }
    EXPECT_EQ(memory_policy(), MPOL_PREFERRED) << "a policy of the program's own stays";
    ASSERT_EQ(syscall(SYS_set_mempolicy, MPOL_DEFAULT, nullptr, 0UL), 0);
  }
  {
    const PreferNode prefer(0);
    EXPECT_EQ(memory_policy(), permitted ? MPOL_PREFERRED : before);
  }
  EXPECT_EQ(memory_policy(), before);
  for (const int none : {-1, 1 << 20}) {
    const PreferNode prefer(none);
    EXPECT_EQ(memory_policy(), before) << none;
  }
}

TEST(NumaVariable, TurnsTheChoicesOff) {
  unsetenv(kNumaVariable);
  EXPECT_TRUE(*follows_numa());
  for (const char* value : {"", "auto"}) {
    setenv(kNumaVariable, value, 1);
    EXPECT_TRUE(*follows_numa()) << value;
  }
  setenv(kNumaVariable, "off", 1);
  EXPECT_FALSE(*follows_numa());
  setenv(kNumaVariable, "0", 1);
  EXPECT_EQ(follows_numa().status().code(), ErrorCode::kInvalidArgument);
  test::run_ranks({.num_ranks = 2}, [](test::RankContext& context) {
    GroupOptions options{.backend = "cpu", .ranks_per_node = 1};
    options.transport = "loopback";
    const Status refused = Group::create(context.bootstrap(), options).status();
    context.expect(refused.code() == ErrorCode::kInvalidArgument, refused.to_string().c_str());
    context.expect(refused.message().find("FERRY_NUMA is \"0\"") != std::string::npos, "the variable is named");
  });
  unsetenv(kNumaVariable);
}

}  // namespace
}  // namespace ferry::net
