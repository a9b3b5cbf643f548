/// Symmetric memory, Routings and groups created and destroyed in every order, while peers wait inside kernels.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "gpu/gpu_group.hpp"

namespace ferry::test {
namespace {

PreparedCase small_case(int num_ranks, MemoryKind memory) {
  ExchangeCase one;
  one.name = "small";
  one.world = {.num_ranks = num_ranks, .num_topk = 3, .num_experts = 7, .layout = Layout::kSlab};
  one.memory = memory;
  one.dispatches = {{.hidden = 512}};
  one.combines = {{.hidden = 512, .weighted = true}};
  return prepare(one);
}

class GpuLifetime : public testing::TestWithParam<RankKind> {};

/// The others' kernels are in progress and wait for rank 0, which allocates and frees memory before it joins them.
TEST_P(GpuLifetime, OneRankAllocatesWhileOthersExchange) {
  constexpr int kNumRanks = 3;
  const PreparedCase prepared = small_case(kNumRanks, MemoryKind::kSymmetric);
  run_gpu_group(GetParam(), kNumRanks, [&](RankContext& context, Group& group) {
    Round round(context, group, prepared);
    for (int turn = 0; turn < 8; ++turn) {
      meet(context);
      if (context.rank() == turn % kNumRanks) {
        std::vector<Buffer> buffers;
        for (int i = 0; i < 20; ++i) {
          auto buffer = group.allocate((std::size_t{1} << 20) * static_cast<std::size_t>(1 + (i * 7 + turn) % 16));
          if (!context.expect_ok(buffer.status(), "allocate")) break;
          buffers.push_back(std::move(*buffer));
          if (i % 3 == 2) buffers.erase(buffers.begin());
        }
        for (const Buffer& buffer : buffers) fill_device(buffer.data(), std::byte{0xEE}, buffer.size_bytes());
      }
      if (!round.start(context, group, stream_of(group))) return;
      if (!context.expect_ok(group.wait(stream_of(group)), "wait")) return;
      round.expect_received(context);
      round.refill(context, prepared);
    }
  });
}

TEST_P(GpuLifetime, OneRankAllocatesWhileOthersAreIdle) {
  run_gpu_group(GetParam(), 3, [&](RankContext& context, Group& group) {
    if (context.rank() == 1) {
      for (int i = 0; i < 30; ++i) {
        const auto buffer = group.allocate(static_cast<std::size_t>(4096 << (i % 12)));
        if (!context.expect_ok(buffer.status(), "allocate")) break;
        const Bytes bytes = read_memory(true, buffer->data(), buffer->size_bytes());
        context.expect(std::all_of(bytes.begin(), bytes.end(), [](std::byte byte) { return byte == std::byte{0}; }),
                       "allocated memory is not zero");
        fill_device(buffer->data(), std::byte{0xFF}, buffer->size_bytes());
      }
    }
    meet(context);
  });
}

/// The group, a Routing and a Buffer end in each of the six orders; the remaining objects stay usable.
TEST_P(GpuLifetime, GroupRoutingAndBufferEndInAnyOrder) {
  constexpr int kNumRanks = 2;
  const PreparedCase prepared = small_case(kNumRanks, MemoryKind::kPlain);
  run_gpu_ranks({GetParam(), kNumRanks}, [&](RankContext& context) {
    std::array<int, 3> order = {0, 1, 2};
    do {
      auto group = Group::create(context.bootstrap(), gpu_group_options());
      if (!context.expect_ok(group.status(), "Group::create")) return;
      Routing routing = check_route(context, **group, prepared);
      auto buffer = (*group)->allocate(100'000);
      if (!routing.present() || !context.expect_ok(buffer.status(), "allocate")) return;
      Buffer held = std::move(*buffer);
      check_dispatch(context, **group, routing, prepared, 0);
      meet(context);
      const oracle::RankRouting& expected = prepared.routings[static_cast<std::size_t>(context.rank())];
      for (int step : order) {
        if (step == 0) group->reset();
        if (step == 1) routing = {};
        if (step == 2) held = {};
        if (routing.present()) {
          const Bytes slots = read_memory(true, routing.slots().data, expected.slots.size() * sizeof(std::int32_t));
          context.expect(std::memcmp(slots.data(), expected.slots.data(), slots.size()) == 0, "slots changed");
          context.expect(routing.num_used_rows() == expected.num_used_rows, "num_used_rows changed");
        }
        if (held.data() != nullptr) {
          fill_device(held.data(), std::byte{0x3C}, held.size_bytes());
          const Bytes bytes = read_memory(true, held.data(), held.size_bytes());
          context.expect(bytes[99'999] == std::byte{0x3C}, "the buffer is not usable");
        }
      }
    } while (std::next_permutation(order.begin(), order.end()));
  });
}

TEST_P(GpuLifetime, GroupsEndInAnotherOrderThanTheyCame) {
  constexpr int kNumRanks = 2;
  const PreparedCase prepared = small_case(kNumRanks, MemoryKind::kSymmetric);
  run_gpu_ranks({GetParam(), kNumRanks}, [&](RankContext& context) {
    std::vector<std::shared_ptr<Group>> groups;
    for (int i = 0; i < 4; ++i) {
      auto group = Group::create(context.bootstrap(), gpu_group_options());
      if (!context.expect_ok(group.status(), "Group::create")) return;
      groups.push_back(*group);
    }
    for (std::size_t end : {2U, 0U, 1U, 0U}) {
      for (const std::shared_ptr<Group>& group : groups) check_case(context, *group, prepared);
      context.expect_ok(groups[end]->destroy(), "destroy");
      groups.erase(groups.begin() + static_cast<std::ptrdiff_t>(end));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuLifetime, testing::Values(RankKind::kThreads, RankKind::kProcesses),
                         [](const auto& test) { return kind_name(test.param); });

}  // namespace
}  // namespace ferry::test
