#include <fmt/format.h>

#include <atomic>
#include <cstring>

#include "conformance/backend_config.hpp"
#include "support/exchange_check.hpp"

namespace ferry::test {
namespace {

class LifetimeConformance : public Conformance {
 protected:
  std::vector<PreparedCase> random_cases(int num_ranks, int count, std::uint64_t seed) const {
    std::mt19937_64 random(seed);
    std::vector<PreparedCase> cases;
    for (int i = 0; i < count; ++i) cases.push_back(prepare(draw_case(random, num_ranks)));
    return cases;
  }
};

TEST_P(LifetimeConformance, RoutingsAreUsedInAnyOrderAndMixed) {
  const std::vector<PreparedCase> cases = random_cases(3, 4, 21);
  run_with_group(3, [&](RankContext& context, Group& group) {
    std::vector<Routing> routings;
    for (const PreparedCase& one : cases) routings.push_back(check_route(context, group, one));
    for (const Routing& routing : routings)
      if (!routing.present()) return;
    for (std::size_t i = cases.size(); i-- > 0;) check_combine(context, group, routings[i], cases[i], 0);
    for (std::size_t i = 0; i < cases.size(); ++i) check_dispatch(context, group, routings[i], cases[i], 0);
    const Routing copy = routings[1];
    routings.clear();
    check_dispatch(context, group, copy, cases[1], 0);
    check_combine(context, group, copy, cases[1], 0);
  });
}

TEST_P(LifetimeConformance, SeveralGroupsAtOnce) {
  const std::vector<PreparedCase> cases = random_cases(3, 3, 22);
  run_on_ranks(3, [&](RankContext& context) {
    auto first = Group::create(context.bootstrap(), group_options(context));
    auto second = Group::create(context.bootstrap(), group_options(context));
    if (!context.expect_ok(first.status(), "first group") || !context.expect_ok(second.status(), "second group"))
      return;
    for (const PreparedCase& one : cases) {
      const Routing in_first = check_route(context, **first, one);
      const Routing in_second = check_route(context, **second, one);
      if (!in_first.present() || !in_second.present()) return;
      check_dispatch(context, **first, in_first, one, 0);
      check_dispatch(context, **second, in_second, one, 0);
      check_combine(context, **second, in_second, one, 0);
      check_combine(context, **first, in_first, one, 0);
    }
    context.expect_ok((*first)->destroy(), "destroy the first group");
    check_case(context, **second, cases[0]);
    context.expect_ok((*second)->destroy(), "destroy the second group");
  });
}

TEST_P(LifetimeConformance, GroupsComeAndGo) {
  const std::vector<PreparedCase> cases = random_cases(2, 6, 23);
  run_on_ranks(2, [&](RankContext& context) {
    for (const PreparedCase& one : cases) {
      auto group = Group::create(context.bootstrap(), group_options(context));
      if (!context.expect_ok(group.status(), "Group::create")) return;
      check_case(context, **group, one);
      context.expect_ok((*group)->destroy(), "destroy");
      context.expect_code((*group)->destroy(), ErrorCode::kInvalidArgument, "destroy a second time");
    }
  });
}

// Freeing a group's memory on one rank must not block the other ranks' calls in another group.
TEST_P(LifetimeConformance, GroupsEndWhileAnotherWorks) {
  const std::vector<PreparedCase> cases = random_cases(3, 6, 24);
  run_with_group(3, [&](RankContext& context, Group& stays) {
    for (const PreparedCase& one : cases) {
      auto ends = Group::create(context.bootstrap(), group_options(context));
      if (!context.expect_ok(ends.status(), "Group::create")) return;
      check_case(context, **ends, one);
      context.expect_ok((*ends)->destroy(), "destroy");
      check_case(context, stays, one);
    }
  });
}

TEST_P(LifetimeConformance, RoutingAndBufferOutliveTheirGroup) {
  ExchangeCase spec;
  spec.name = "outlives";
  spec.world = {.num_ranks = 2, .num_topk = 3, .num_experts = 5};
  const PreparedCase prepared = prepare(spec);
  run_on_ranks(2, [&](RankContext& context) {
    Routing routing;
    Buffer buffer;
    bool on_device = false;
    {
      auto group = Group::create(context.bootstrap(), group_options(context));
      if (!context.expect_ok(group.status(), "Group::create")) return;
      on_device = uses_device(**group);
      routing = check_route(context, **group, prepared);
      auto allocated = (*group)->allocate(1000);
      if (!routing.present() || !context.expect_ok(allocated.status(), "allocate")) return;
      buffer = std::move(*allocated);
      context.expect_ok((*group)->destroy(), "destroy");
    }
    const auto& expected = prepared.routings[static_cast<std::size_t>(context.rank())];
    const std::size_t slot_bytes = expected.slots.size() * sizeof(std::int32_t);
    const Bytes slots = read_memory(on_device, routing.slots().data, slot_bytes);
    context.expect(std::memcmp(slots.data(), expected.slots.data(), slot_bytes) == 0, "slots changed");
    context.expect(routing.num_recv_rows() == expected.num_recv_rows, "num_recv_rows changed");
    fill_memory(on_device, buffer.data(), std::byte{0x5A}, buffer.size_bytes());
    const Bytes held = read_memory(on_device, buffer.data(), buffer.size_bytes());
    context.expect(held[999] == std::byte{0x5A}, "the buffer is not usable");
  });
}

/// The test ends by the interruption, not by the deadline of the group's waits.
TEST_P(LifetimeConformance, AProgramEndsItsWaitForALateRank) {
  const int num_ranks = 3;
  const int interrupted = 1;
  const int late = 2;
  ExchangeCase spec;
  spec.name = "interrupted";
  spec.world = {.num_ranks = num_ranks, .num_topk = 3, .num_experts = 6};
  const PreparedCase prepared = prepare(spec);
  run_on_ranks(num_ranks, [&](RankContext& context) {
    std::atomic<bool> wants_end{false};
    GroupOptions options = group_options(context);
    options.timeout_ns = kDefaultCallTimeoutNs;
    if (context.rank() == interrupted) options.interrupted = [&wants_end] { return wants_end.load(); };
    auto group = Group::create(context.bootstrap(), options);
    if (!context.expect_ok(group.status(), "Group::create")) return;
    check_case(context, **group, prepared);
    const auto meet = [&] { (void)context.bootstrap()->all_gather({}, kDefaultCallTimeoutNs); };
    wants_end = true;
    if (context.rank() == late) meet();
    const RouteArguments arguments(context, **group, prepared);
    const auto route = [&] {
      return (*group)->route(arguments.input(), arguments.options(), stream_of(**group)).status();
    };
    Status status = route();
    // The other ranks may have done their parts of the late rank's call: its next call gets the error.
    if (status.ok() && context.rank() == late) status = route();
    context.expect_code(status, ErrorCode::kPeerLost, "route");
    context.expect(status.peer() == interrupted, fmt::format("blamed rank {}", status.peer()));
    context.expect(status.message().find("GroupOptions::interrupted") != std::string_view::npos, status.to_string());
    if (context.rank() != late) meet();
    meet();  // all keep their groups until the late rank has its error
  });
}

TEST_P(LifetimeConformance, MemoryIsZeroedAlignedAndReused) {
  run_with_group(2, [&](RankContext& context, Group& group) {
    // Ranks allocate at their own pace and sizes.
    for (int round = 0; round < 20 + context.rank(); ++round) {
      auto buffer = group.allocate(static_cast<std::size_t>(5000 + 4096 * round * (1 + context.rank())));
      if (!context.expect_ok(buffer.status(), "allocate")) return;
      context.expect(reinterpret_cast<std::uintptr_t>(buffer->data()) % 4096 == 0, "not aligned to a page");
      for (std::byte byte : read_memory(uses_device(group), buffer->data(), buffer->size_bytes()))
        if (!context.expect(byte == std::byte{0}, "allocated memory is not zero")) return;
      fill_memory(uses_device(group), buffer->data(), std::byte{0xFF}, buffer->size_bytes());
    }
  });
}

/// Flags and staging of a call must not affect the next call, however the shapes change.
TEST_P(LifetimeConformance, ManyCallsBackToBack) {
  const std::vector<PreparedCase> cases = random_cases(4, 12, 24);
  run_with_group(4, [&](RankContext& context, Group& group) {
    std::vector<Routing> routings;
    for (const PreparedCase& one : cases) routings.push_back(check_route(context, group, one));
    for (int round = 0; round < 10; ++round) {
      for (std::size_t i = 0; i < cases.size(); ++i) {
        if (!routings[i].present()) return;
        check_dispatch(context, group, routings[i], cases[i], 0);
        check_combine(context, group, routings[i], cases[i], 0);
      }
    }
  });
}

/// Ranks that arrive at very different times give the same results: rank 0 allocates and fills before every call.
TEST_P(LifetimeConformance, UnevenRanks) {
  const std::vector<PreparedCase> cases = random_cases(3, 6, 25);
  run_with_group(3, [&](RankContext& context, Group& group) {
    for (const PreparedCase& one : cases) {
      if (context.rank() == 0) {
        auto buffer = group.allocate(std::size_t{8} << 20);
        if (context.expect_ok(buffer.status(), "allocate"))
          fill_memory(uses_device(group), buffer->data(), std::byte{1}, buffer->size_bytes());
      }
      check_case(context, group, one);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, LifetimeConformance, ::testing::ValuesIn(backend_configs()), config_name);

}  // namespace
}  // namespace ferry::test
