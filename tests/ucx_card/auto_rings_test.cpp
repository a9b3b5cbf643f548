/// GroupOptions::ring_memory "auto" on emulated GPUs whose hosts have stand-ins for cards: GPU memory where the card of
/// every rank is near its GPU and reaches it, else host memory on every rank, without an error.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/transports.hpp"
#include "gpu/gpu_group.hpp"
#include "gpu/latency_group.hpp"
#include "ucx_card/hosts.hpp"
#include "ucx_card/rounds.hpp"
#include "ucx_card/variable.hpp"

namespace ferry::test {
namespace {

/// Whether the card of the thread's host is near its GPU.
thread_local bool is_near = true;

}  // namespace

using Path = std::filesystem::path;

// The name under which the linker's option --wrap finds what replaces net::nearest_ports.
std::vector<std::string>
ports_seen(std::string_view pci_address, std::span<const NetDeviceInfo> devices, const Path& sys) __asm__(
    "__wrap__ZN5ferry3net13nearest_portsESt17basic_string_viewIcSt11char_traitsIcEESt4spanIKNS_13NetDeviceInfoELm"
    "18446744073709551615EERKNSt10filesystem7__cxx114pathE");

std::vector<std::string> ports_seen(std::string_view /*pci_address*/, std::span<const NetDeviceInfo> devices,
                                    const Path& /*sys*/) {
  std::vector<std::string> ports;
  for (const NetDeviceInfo& device : devices) {
    if (is_near && device.rdma) ports.push_back(device.name);
  }
  return ports;
}

namespace {

constexpr std::int64_t kTimeoutNs = 30 * kNsPerSecond;

GroupOptions options_of(int ranks_per_node, const char* ring_memory) {
  GroupOptions options = gpu_group_options();
  options.ranks_per_node = ranks_per_node;
  options.transport = "ucx";
  options.ring_memory = ring_memory;
  options.timeout_ns = kTimeoutNs;
  return options;
}

/// Runs `body` on ranks of two hosts. `far_rank`: the one whose card is not near its GPU; -1: none.
void run_on_hosts(const GroupOptions& options, int far_rank, const std::function<void(RankContext&, Group&)>& body) {
  run_gpu_ranks({RankKind::kThreads, 2 * options.ranks_per_node}, [&](RankContext& context) {
    enter_host(context.rank() / options.ranks_per_node);
    is_near = context.rank() != far_rank;
    auto group = Group::create(context.bootstrap(), options);
    if (!context.expect_ok(group.status(), "Group::create")) return;
    body(context, **group);
    context.expect_ok((*group)->destroy(), "destroy");
  });
}

std::vector<PreparedCase> cases_of(int ranks_per_node) {
  std::mt19937_64 random(17);
  std::vector<PreparedCase> cases;
  for (int i = 0; i < 2; ++i) {
    ExchangeCase spec = draw_case(random, 2 * ranks_per_node);
    spec.world.num_ranks = 2 * ranks_per_node;
    spec.world.ranks_per_node = ranks_per_node;
    cases.push_back(prepare(spec));
  }
  return cases;
}

class UcxCardAuto : public testing::TestWithParam<int> {};

TEST_P(UcxCardAuto, RingsAreInGpuMemoryAndResultsTheOracles) {
  const CardSettings settings("seed=5,latency_ns=100000,piece_bytes=512");
  const std::vector<PreparedCase> cases = cases_of(GetParam());
  run_on_hosts(options_of(GetParam(), "auto"), -1, [&](RankContext& context, Group& group) {
    const NetworkUsage usage = group.network_usage();
    context.expect(usage.ring_memory == "gpu", "rings in " + usage.ring_memory + " memory: " + usage.why_host_memory);
    context.expect(usage.why_host_memory.empty(), usage.why_host_memory);
    for (const PreparedCase& one : cases) check_case(context, group, one);
  });
}

INSTANTIATE_TEST_SUITE_P(RanksPerNode, UcxCardAuto, testing::Values(1, 2));

/// Memory that a rank's network takes with rings in host memory.
std::size_t host_bytes() {
  std::size_t bytes = 0;
  run_on_hosts(options_of(1, "host"), -1, [&bytes](RankContext& context, Group& group) {
    if (context.rank() == 0) bytes = group.memory_usage().network_bytes;
  });
  return bytes;
}

struct Obstacle {
  const char* name;
  const char* settings;
  int far_rank;
  const char* words;
};
void PrintTo(const Obstacle& obstacle, std::ostream* out) { *out << obstacle.name; }

class UcxCardObstacle : public testing::TestWithParam<Obstacle> {};

TEST_P(UcxCardObstacle, OfOneRankHasAllRanksTakeHostMemory) {
  const std::size_t expected_bytes = host_bytes();
  const CardSettings settings(GetParam().settings);
  const std::vector<PreparedCase> cases = cases_of(1);
  run_on_hosts(options_of(1, "auto"), GetParam().far_rank, [&](RankContext& context, Group& group) {
    const NetworkUsage usage = group.network_usage();
    context.expect(usage.ring_memory == "host", "rings in " + usage.ring_memory + " memory");
    context.expect(usage.why_host_memory.find(GetParam().words) != std::string::npos, usage.why_host_memory);
    context.expect(usage.why_host_memory.find(';') == std::string::npos, usage.why_host_memory);
    context.expect(group.memory_usage().network_bytes == expected_bytes, "nothing is left of rings in GPU memory");
    for (const PreparedCase& one : cases) check_case(context, group, one);
  });
}

INSTANTIATE_TEST_SUITE_P(
    , UcxCardObstacle,
    testing::Values(Obstacle{"far_card", "", 1, "rank 1 has no RDMA card near its GPU"},
                    Obstacle{"registration", "fail=map_gpu,status=4,end=1", -1, "registering GPU memory"},
                    Obstacle{"no_card_between", "cards=0", -1, "only InfiniBand and RoCE cards"},
                    Obstacle{"puts", "latency_ns=100000,fail=put_gpu,end=0", -1, "cards do not reach the GPU memory"},
                    Obstacle{"puts_of_both", "fail=put_gpu", -1, "cards do not reach the GPU memory"}),
    [](const auto& instance) { return instance.param.name; });

/// Where cards fill rings, and one end of latency mode's network cannot have its rows in GPU memory.
class UcxCardRowsObstacle : public testing::TestWithParam<const char*> {};

TEST_P(UcxCardRowsObstacle, HasAllRanksTakeHostMemoryForRows) {
  const std::vector<PreparedCase> cases = latency_cases_of_equal_shapes(2, 1, true, 1);
  GroupOptions options = options_of(1, "auto");
  options.latency_bytes = latency_bytes_of("cuda", cases);
  std::size_t bytes_with_rows = 0;
  run_on_hosts(options, -1, [&](RankContext& context, Group& group) {
    if (context.rank() == 0) bytes_with_rows = group.memory_usage().network_bytes;
  });
  const CardSettings settings(GetParam());
  run_on_hosts(options, -1, [&](RankContext& context, Group& group) {
    const NetworkUsage usage = group.network_usage();
    context.expect(usage.ring_memory == "gpu", "rings in " + usage.ring_memory + " memory: " + usage.why_host_memory);
    context.expect(group.memory_usage().network_bytes < bytes_with_rows, "rows are in GPU memory");
    check_latency_case(context, group, cases[0], Halves::kTogether);
    check_latency_case(context, group, cases[0], Halves::kSplit);
  });
}

// The ends of rings are the first of each rank.
INSTANTIATE_TEST_SUITE_P(, UcxCardRowsObstacle, testing::Values("fail=map_gpu,status=4,end=3", "fail=put_gpu,end=2"),
                         [](const auto& instance) { return instance.index == 0 ? "registration" : "puts"; });

/// Writes so late that ranks stop waiting for them, long before their own deadline.
TEST(UcxCardAutoOnce, WritesThatLastTooLongHaveAllRanksTakeHostMemory) {
  const CardSettings settings("steady=1,write_latency_ns=3000000000");
  GroupOptions options = options_of(1, "auto");
  options.timeout_ns = 8 * kNsPerSecond;
  run_on_hosts(options, -1, [&](RankContext& context, Group& group) {
    const NetworkUsage usage = group.network_usage();
    context.expect(usage.ring_memory == "host", "rings in " + usage.ring_memory + " memory");
    context.expect(usage.why_host_memory.find("did not reach its GPU in 2.0 s") != std::string::npos,
                   usage.why_host_memory);
  });
}

TEST(UcxCardAutoOnce, AFailedProbeIsAnErrorWhereGpuMemoryWasAskedFor) {
  const CardSettings settings("latency_ns=100000,fail=put_gpu,end=0");
  run_gpu_ranks({RankKind::kThreads, 2}, [&](RankContext& context) {
    enter_host(context.rank());
    const Status status = Group::create(context.bootstrap(), options_of(1, "gpu")).status();
    context.expect_code(status, ErrorCode::kUnsupported, "puts fail");
  });
}

}  // namespace
}  // namespace ferry::test
