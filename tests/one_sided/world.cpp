#include "one_sided/world.hpp"

#include <optional>

#include "support/loopback_faults.hpp"

namespace ferry::test {
namespace {

constexpr std::uint64_t kSeed = 7;
constexpr int kDelayPolls = 3;

}  // namespace

std::ostream& operator<<(std::ostream& out, const World& world) { return out << world.name; }

std::vector<World> all_worlds() {
  std::vector<World> worlds{
      {.name = "one_rank", .num_ranks = 1, .ranks_per_node = 1},
      {.name = "threads_4", .num_ranks = 4, .ranks_per_node = 4},
      {.name = "processes_3", .kind = RankKind::kProcesses, .num_ranks = 3, .ranks_per_node = 3},
      {.name = "loopback_3_nodes", .num_ranks = 3, .ranks_per_node = 1, .transport = "loopback"},
      {.name = "loopback_2x2_scrambled",
       .num_ranks = 4,
       .ranks_per_node = 2,
       .transport = "loopback",
       .scrambled = true},
  };
#if defined(FERRY_TESTS_WITH_UCX)
  worlds.push_back({.name = "ucx_2x2_processes",
                    .kind = RankKind::kProcesses,
                    .num_ranks = 4,
                    .ranks_per_node = 2,
                    .transport = "ucx"});
#endif
  return worlds;
}

std::vector<World> process_worlds() {
  std::vector<World> worlds;
  for (const World& world : all_worlds()) {
    if (world.kind == RankKind::kProcesses) worlds.push_back(world);
  }
  return worlds;
}

OneSidedOptions options_of(const World& world) {
  OneSidedOptions options;
  options.backend = "cpu";
  options.heap_bytes = std::size_t{4} << 20;
  options.ranks_per_node = world.ranks_per_node;
  options.transport = world.transport;
  options.timeout_ns = 60 * kNsPerSecond;
  return options;
}

void run_world(const World& world, const OneSidedBody& body) { run_world(world, options_of(world), body); }

void run_world(const World& world, const OneSidedOptions& options, const OneSidedBody& body) {
  std::optional<net::LoopbackFaults> faults;
  if (world.scrambled) {
    faults.emplace();
    faults->scramble(kSeed);
    for (int from = 0; from < world.num_ranks; ++from) {
      for (int to = 0; to < world.num_ranks; ++to) faults->delay(from, to, kDelayPolls);
    }
  }
  run_ranks({.kind = world.kind, .num_ranks = world.num_ranks}, [&](RankContext& context) {
    Result<std::shared_ptr<OneSided>> shm = OneSided::create(context.bootstrap(), options);
    if (!context.expect_ok(shm.status(), "create")) return;
    body(context, **shm);
    if (context.failures().empty()) context.expect_ok((*shm)->destroy(), "destroy");
  });
}

}  // namespace ferry::test
