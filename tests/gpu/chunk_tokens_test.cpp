/// `chunk_tokens` over several nodes: how many rows a rank's chunks have, whatever the other ranks say.

#include <gtest/gtest.h>

#include <array>
#include <cstdint>

#include "gpu/gpu_group.hpp"

namespace ferry::test {
namespace {

constexpr int kNumNodes = 2;

/// Two nodes of one rank each, between which every token of a rank goes: all pick experts of both.
PreparedCase two_nodes() {
  ExchangeCase one;
  one.name = "chunks";
  one.world = {.num_ranks = kNumNodes, .num_topk = 8, .num_experts = 8, .max_tokens = 40};
  one.world.ranks_per_node = 1;
  one.dispatches = {{.hidden = 64, .num_scales = 3}};
  one.combines = {{.hidden = 64}};
  return prepare(one);
}

/// Messages that each rank sends in a dispatch and a combine, of which both return the oracle's rows.
std::array<std::uint64_t, kNumNodes> messages_of_calls(const PreparedCase& prepared,
                                                       const std::array<int, kNumNodes>& chunk_tokens) {
  std::array<std::uint64_t, kNumNodes> messages{};
  run_gpu_ranks({RankKind::kThreads, kNumNodes}, [&](RankContext& context) {
    GroupOptions options = gpu_group_options();
    options.ranks_per_node = 1;
    options.transport = "loopback";
    const auto made = Group::create(context.bootstrap(), options);
    if (!context.expect_ok(made.status(), "Group::create")) return;
    Group& group = **made;
    const RouteArguments arguments(context, group, prepared);
    DispatchTensors sent(context, group, prepared, 0);
    CombineTensors returned(context, group, prepared, 0);
    const auto rank = static_cast<std::size_t>(context.rank());
    sent.options.kernel.chunk_tokens = returned.options.kernel.chunk_tokens = chunk_tokens[rank];
    const Stream stream = stream_of(group);
    const auto routing = group.route(arguments.input(), arguments.options(), stream);
    if (!context.expect_ok(routing.status(), "route")) return;
    context.expect_ok(group.wait(stream), "wait for the route");
    const std::uint64_t before = group.network_usage().rails.front().num_messages;
    context.expect_ok(group.dispatch(*routing, sent.in, sent.out, stream, sent.options), "dispatch");
    context.expect_ok(group.combine(*routing, returned.in, returned.out, stream, returned.options), "combine");
    context.expect_ok(group.wait(stream), "wait");
    sent.expect_received(context, "dispatch: ");
    returned.expect_received(context, "combine: ");
    messages[rank] = group.network_usage().rails.front().num_messages - before;
    context.expect_ok(group.destroy(), "destroy");
  });
  return messages;
}

TEST(ChunkTokens, DecideOverNodesHowManyRowsAChunkOfTheirRankHas) {
  const PreparedCase prepared = two_nodes();
  const auto by_default = messages_of_calls(prepared, {0, 0});
  const auto one_of_both = messages_of_calls(prepared, {1, 1});
  const auto one_of_first = messages_of_calls(prepared, {1, 0});
  for (std::size_t rank = 0; rank < kNumNodes; ++rank) {
    EXPECT_GT(one_of_both[rank], by_default[rank] + 8) << "rank " << rank;
  }
  EXPECT_GT(one_of_first[0], by_default[0] + 8);
  EXPECT_LT(one_of_first[1], one_of_both[1]) << "the other rank's rows stay together";
}

}  // namespace
}  // namespace ferry::test
