/// A forked child holds a copy of its parent's group; the rank and its peers continue whatever happens to the copy.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "ferry/ferry.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {
namespace {

constexpr int kNumRanks = 2;

/// Returns true if `copy` returns true in a forked process.
template <typename Copy>
bool holds_in_child(const Copy& copy) {
  const pid_t child = fork();
  if (child == 0) _exit(copy() ? 0 : 1);
  int ended = -1;
  return child > 0 && waitpid(child, &ended, 0) == child && ended == 0;
}

/// `ranks_per_node`: the group has one node or two.
void check_group(int ranks_per_node) {
  run_ranks({.kind = RankKind::kProcesses, .num_ranks = kNumRanks}, [ranks_per_node](RankContext& context) {
    Result<std::shared_ptr<Group>> made =
        Group::create(context.bootstrap(), {.backend = "cpu", .ranks_per_node = ranks_per_node});
    if (!context.expect_ok(made.status(), "create")) return;
    std::shared_ptr<Group> group = std::move(*made);
    Buffer buffer = group->allocate(4096).value();
    const std::span<std::uint8_t> bytes(static_cast<std::uint8_t*>(buffer.data()), buffer.size_bytes());
    std::ranges::fill(bytes, 0xA5);
    const std::array<std::int64_t, 4> ids{0, 1, 2, 3};
    const auto route = [&ids](Group& on) {
      return on.route({ConstTensorView(ids.data(), DType::kInt64, {2, 2})}, {.num_experts = 4}).status();
    };
    context.expect(holds_in_child([&] {
                     const bool silent = group->network_usage().rails.empty() && group->wait_times_ns().empty() &&
                                         group->memory_usage().total_bytes() == 0;
                     const bool refused = silent && route(*group).code() == ErrorCode::kInvalidArgument &&
                                          group->destroy().code() == ErrorCode::kInvalidArgument &&
                                          group->allocate(1).status().code() == ErrorCode::kInvalidArgument;
                     buffer = {};
                     group.reset();
                     return refused;
                   }),
                   "a child's calls are refused, and it drops its copies");
    context.expect(std::ranges::all_of(bytes, [](std::uint8_t byte) { return byte == 0xA5; }),
                   "memory that the child dropped is unchanged in the parent");
    context.expect_ok(route(*group), "route after the child has ended");
    context.expect_ok(group->destroy(), "destroy");
  });
}

TEST(ForkedCopy, OfAGroupIsRefusedAndEndsAlone) { check_group(kNumRanks); }

TEST(ForkedCopy, OfAGroupOfTwoNodesIsRefusedAndEndsAlone) { check_group(1); }

TEST(ForkedCopy, OfAOneSidedIsRefusedAndEndsAlone) {
  run_ranks({.kind = RankKind::kProcesses, .num_ranks = kNumRanks}, [](RankContext& context) {
    Result<std::shared_ptr<OneSided>> made = OneSided::create(context.bootstrap(), {.backend = "cpu"});
    if (!context.expect_ok(made.status(), "create")) return;
    std::shared_ptr<OneSided> shm = std::move(*made);
    context.expect(holds_in_child([&] {
                     const bool refused = shm->barrier().code() == ErrorCode::kInvalidArgument;
                     shm.reset();
                     return refused;
                   }),
                   "a child's calls are refused, and it drops its copy");
    context.expect_ok(shm->barrier(), "barrier after the child has ended");
    context.expect_ok(shm->destroy(), "destroy");
  });
}

}  // namespace
}  // namespace ferry::test
