#include "one_sided/world.hpp"
#include "ucx_card/hosts.hpp"

namespace ferry::test {

std::ostream& operator<<(std::ostream& out, const World& world) { return out << world.name; }

std::vector<World> all_worlds() {
  return {{.name = "card_3_hosts", .num_ranks = 3, .ranks_per_node = 1, .transport = "ucx"},
          {.name = "card_2x2", .num_ranks = 4, .ranks_per_node = 2, .transport = "ucx"}};
}

std::vector<World> process_worlds() { return {}; }

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
  run_ranks({.kind = world.kind, .num_ranks = world.num_ranks}, [&](RankContext& context) {
    enter_host(context.rank() / world.ranks_per_node);
    Result<std::shared_ptr<OneSided>> shm = OneSided::create(context.bootstrap(), options);
    if (!context.expect_ok(shm.status(), "create")) return;
    body(context, **shm);
    if (context.failures().empty()) context.expect_ok((*shm)->destroy(), "destroy");
  });
}

}  // namespace ferry::test
