#ifndef FERRY_TESTS_ONE_SIDED_WORLD_HPP
#define FERRY_TESTS_ONE_SIDED_WORLD_HPP

/// Groups of ranks for tests of the one-sided layer: threads and processes, one node and several, networks that keep no
/// order.

#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "ferry/one_sided.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {

struct World {
  std::string name;
  RankKind kind = RankKind::kThreads;
  int num_ranks = 1;
  int ranks_per_node = 0;
  std::string transport = "auto";
  bool scrambled = false;  ///< loopback: least order that engines promise, and delayed
};
std::ostream& operator<<(std::ostream& out, const World& world);

std::vector<World> all_worlds();
/// Worlds in which a rank can die without ending the test.
std::vector<World> process_worlds();

using OneSidedBody = std::function<void(RankContext&, OneSided&)>;

/// Options with small heaps and a deadline that no healthy run reaches.
OneSidedOptions options_of(const World& world);
/// Runs the body on every rank of a new OneSided. All ranks destroy it afterwards unless the body failed.
void run_world(const World& world, const OneSidedBody& body);
void run_world(const World& world, const OneSidedOptions& options, const OneSidedBody& body);

/// Allocates a block; on failure, reports it and returns an empty span.
template <typename T>
std::span<T> block(RankContext& context, OneSided& shm, std::size_t count) {
  Result<std::span<T>> made = shm.allocate<T>(count);
  return context.expect_ok(made.status(), "allocate") ? *made : std::span<T>();
}

}  // namespace ferry::test

#endif  // FERRY_TESTS_ONE_SIDED_WORLD_HPP
