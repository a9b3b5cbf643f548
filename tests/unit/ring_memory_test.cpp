/// Memory of the rings between nodes: the request, the host's abilities, and the value that ranks are shown.

#include "rail/ring_memory.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "ferry/ferry.hpp"
#include "net/gpu_direct.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(GpuDirect, NeedsAModuleOrDmaBuf) {
  std::string pattern = (std::filesystem::temp_directory_path() / "ferry-test-XXXXXX").string();
  const std::filesystem::path modules = mkdtemp(pattern.data());
  EXPECT_FALSE(net::driver_fact(false, modules).present);
  EXPECT_THAT(net::driver_fact(false, modules).advice, HasSubstr("nvidia_peermem"));
  EXPECT_EQ(net::driver_fact(true, modules).observed, "dma-buf");
  std::filesystem::create_directory(modules / "nvidia_peermem");
  EXPECT_EQ(net::driver_fact(true, modules).observed, "module nvidia_peermem");
  EXPECT_TRUE(net::driver_fact(false, modules).present);
  std::filesystem::remove_all(modules);
}

TEST(GpuDirect, NeedsACardWithAnActivePort) {
  std::vector<NetDeviceInfo> devices{{.name = "eth0", .usable = true}};
  EXPECT_EQ(net::card_fact(devices).observed, "no RDMA card");
  devices.push_back({.name = "mlx5_0:1", .rdma = true});
  EXPECT_EQ(net::card_fact(devices).observed, "no active RDMA port");
  EXPECT_FALSE(net::card_fact(devices).present);
  devices.back().usable = true;
  EXPECT_TRUE(net::card_fact(devices).present);
}

TEST(GpuDirect, SaysEverythingThatIsMissing) {
  const std::vector<GpuDirectFact> facts{
      {"gpu", true, "GPU 0", ""}, {"driver", false, "no module", "load it"}, {"card", false, "no card", "add one"}};
  EXPECT_TRUE(rail::check_ring_memory("auto", facts).ok());
  EXPECT_TRUE(rail::check_ring_memory("host", facts).ok());
  const Status status = rail::check_ring_memory("gpu", facts);
  EXPECT_EQ(status.code(), ErrorCode::kUnsupported);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("driver: no module (load it); card: no card (add one)"), Not(HasSubstr("GPU 0"))));
  EXPECT_TRUE(rail::check_ring_memory("gpu", {facts.front()}).ok());
}

TEST(GpuDirect, CardsKeepNoOrderUnlessTheVariableSaysSo) {
  unsetenv(net::kCardOrderVariable);
  EXPECT_FALSE(*net::cards_keep_order());
  for (const char* value : {"", "flush"}) {
    setenv(net::kCardOrderVariable, value, 1);
    EXPECT_FALSE(*net::cards_keep_order()) << value;
  }
  setenv(net::kCardOrderVariable, "fence", 1);
  EXPECT_TRUE(*net::cards_keep_order());
  setenv(net::kCardOrderVariable, "weak", 1);
  const Status refused = net::cards_keep_order().status();
  EXPECT_EQ(refused.code(), ErrorCode::kInvalidArgument);
  EXPECT_NE(refused.message().find("FERRY_CARD_ORDER is \"weak\""), std::string_view::npos) << refused.to_string();
  unsetenv(net::kCardOrderVariable);
}

TEST(GpuDirect, FactsOfThisHostNameEachNeed) {
  std::vector<std::string> names;
  for (const GpuDirectFact& fact : gpu_direct_facts("loopback")) {
    names.push_back(fact.name);
    EXPECT_FALSE(fact.observed.empty()) << fact.name;
    EXPECT_EQ(fact.present, fact.advice.empty()) << fact.name;
  }
  EXPECT_THAT(names, ::testing::ElementsAre("gpu", "driver", "card", "network library"));
}

GroupOptions with_ring_memory(const char* where, int ranks_per_node) {
  return {.backend = "cpu",
          .ranks_per_node = ranks_per_node,
          .timeout_ns = 20 * kNsPerSecond,
          .transport = "loopback",
          .ring_memory = where};
}

TEST(RingMemory, IsShownAndCannotBeGpuMemoryOnCpuRanks) {
  for (const char* where : {"auto", "host"}) {
    run_ranks({.num_ranks = 2}, [where](RankContext& context) {
      const auto group = Group::create(context.bootstrap(), with_ring_memory(where, 1));
      if (!context.expect_ok(group.status(), where)) return;
      const NetworkUsage usage = (*group)->network_usage();
      context.expect(usage.ring_memory == "host", "rings are in host memory");
      context.expect(usage.why_host_memory == "ranks have no GPU", usage.why_host_memory);
    });
  }
  run_ranks({.num_ranks = 2}, [](RankContext& context) {
    const Status status = Group::create(context.bootstrap(), with_ring_memory("gpu", 1)).status();
    context.expect_code(status, ErrorCode::kUnsupported, "gpu");
    context.expect(status.message().find("set it to auto or host") != std::string::npos, status.to_string());
    const auto one_node = Group::create(context.bootstrap(), with_ring_memory("gpu", 2));
    if (!context.expect_ok(one_node.status(), "one node has no rings")) return;
    context.expect((*one_node)->network_usage().ring_memory.empty(), "no rings");
  });
}

TEST(RingMemory, MustBeTheSameOnEveryRankAndAKnownWord) {
  run_ranks({.num_ranks = 2}, [](RankContext& context) {
    const char* where = context.rank() == 0 ? "auto" : "host";
    Status status = Group::create(context.bootstrap(), with_ring_memory(where, 1)).status();
    context.expect_code(status, ErrorCode::kInvalidArgument, "ranks disagree");
    context.expect(status.message().find("ring_memory=host") != std::string::npos, status.to_string());
    status = Group::create(context.bootstrap(), with_ring_memory("moon", 1)).status();
    context.expect_code(status, ErrorCode::kInvalidArgument, "no such place");
    context.expect(status.message().find("ring_memory is \"moon\"") != std::string::npos, status.to_string());
  });
}

TEST(RingMemory, IsTakenFromTheVariableWhereTheOptionIsAuto) {
  ASSERT_EQ(setenv("FERRY_RING_MEMORY", "gpu", 1), 0);
  run_ranks({.num_ranks = 2}, [](RankContext& context) {
    const Status status = Group::create(context.bootstrap(), with_ring_memory("auto", 1)).status();
    context.expect_code(status, ErrorCode::kUnsupported, "the variable is gpu");
    const auto group = Group::create(context.bootstrap(), with_ring_memory("host", 1));
    context.expect_ok(group.status(), "the option overrides the variable");
  });
  unsetenv("FERRY_RING_MEMORY");
}

}  // namespace
}  // namespace ferry::test
