#include <fmt/format.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sched.h>

#include "conformance/node_shape.hpp"
#include "support/exchange_check.hpp"

/// Groups of several nodes against the oracle, in every shape that a group can have: one rank per node, one node, and
/// all shapes between, over each engine.

namespace ferry::test {
namespace {

class Nodes : public testing::TestWithParam<NodeShape> {
 protected:
  static PreparedCase prepare_on_nodes(const ExchangeCase& spec) { return prepare_on(GetParam(), spec); }
  static void run(const std::function<void(RankContext&, Group&)>& body) { run_on_nodes(GetParam(), body); }
};

TEST_P(Nodes, RandomExchangesAreTheOracles) {
  std::mt19937_64 random(static_cast<std::uint64_t>(77 + GetParam().num_ranks()));
  std::vector<PreparedCase> cases;
  for (int i = 0; i < 25; ++i) cases.push_back(prepare_on_nodes(draw_case(random, GetParam().num_ranks())));
  run([&](RankContext& context, Group& group) {
    for (const PreparedCase& one : cases) check_case(context, group, one);
  });
}

class LargeExchange : public Nodes {};

/// Rows longer than a chunk of any ring are sent in slices, together with weights and scales.
TEST_P(LargeExchange, RowsLongerThanAChunk) {
  ExchangeCase spec;
  spec.name = "long rows";
  spec.world = {.num_topk = 3, .num_experts = 2 * GetParam().num_ranks() + 1, .max_tokens = 3};
  spec.dispatches = {{.hidden = 132000, .num_scales = 7}, {.hidden = 131000}};
  spec.combines = {
      {.dtype = DType::kFloat32, .hidden = 66000, .weighted = true, .num_biases = 2, .return_weights = true},
      {.dtype = DType::kBfloat16, .hidden = 132000}};
  std::vector<PreparedCase> cases;
  for (Layout layout : {Layout::kTokens, Layout::kExperts}) {
    spec.world.layout = layout;
    cases.push_back(prepare_on_nodes(spec));
  }
  run([&](RankContext& context, Group& group) {
    for (const PreparedCase& one : cases) check_case(context, group, one);
  });
}

/// More rows than the rings hold, so that every chunk is reused many times.
TEST_P(LargeExchange, ManyTimesWhatTheRingsHold) {
  ExchangeCase spec;
  spec.name = "many rows";
  spec.world = {.num_topk = 2, .num_experts = 2 * GetParam().num_ranks(), .max_tokens = 400};
  spec.dispatches = {{.hidden = 4096}};
  spec.combines = {{.hidden = 4096, .weighted = true}};
  const PreparedCase prepared = prepare_on_nodes(spec);
  run([&](RankContext& context, Group& group) { check_case(context, group, prepared); });
}

/// Node-limited routing: tokens name experts of one node only, and other nodes receive nothing.
TEST_P(Nodes, WhatCrossesIsOneRecordPerTokenAndNode) {
  constexpr std::int64_t kTokens = 300;
  constexpr std::int64_t kHidden = 2048;
  const int num_ranks = GetParam().num_ranks();
  const std::int64_t num_experts = 2 * num_ranks;
  run([&](RankContext& context, Group& group) {
    // Every token goes to all experts of the next node, and to no other.
    const int target = (group.topology().node_of(context.rank()) + 1) % GetParam().num_nodes;
    const int num_topk = std::min(8, 2 * GetParam().ranks_per_node);
    std::vector<std::int64_t> ids;
    for (std::int64_t token = 0; token < kTokens; ++token) {
      for (int k = 0; k < num_topk; ++k) ids.push_back(target * 2 * GetParam().ranks_per_node + k);
    }
    const RouteInput in{ConstTensorView(ids.data(), DType::kInt64, {kTokens, num_topk}), {}};
    const Result<Routing> routing = group.route(in, {.num_experts = num_experts});
    if (!context.expect_ok(routing.status(), "route")) return;
    const std::vector<std::uint16_t> x(static_cast<std::size_t>(kTokens * kHidden), 0x3F80);
    std::vector<std::uint16_t> received(static_cast<std::size_t>(routing->num_recv_rows() * kHidden));
    const NetworkUsage before = group.network_usage();
    DispatchInput input;
    input.x = ConstTensorView(x.data(), DType::kBfloat16, {kTokens, kHidden});
    DispatchOutput output;
    output.x = TensorView(received.data(), DType::kBfloat16, {routing->num_recv_rows(), kHidden});
    if (!context.expect_ok(group.dispatch(*routing, input, output), "dispatch")) return;
    const NetworkUsage after = group.network_usage();
    for (std::size_t i = 0; i < after.rails.size(); ++i) {
      const auto sent = static_cast<double>(after.rails[i].sent_bytes - before.rails[i].sent_bytes);
      const bool goes_there = group.topology().node_of(after.rails[i].rank) == target;
      const double payload = goes_there ? static_cast<double>(kTokens * kHidden * 2) : 0.0;
      // Tolerance for the call header and a header per chunk.
      context.expect(sent >= payload && sent <= payload * 1.01 + 2048,
                     fmt::format("{} bytes to rank {}, expected about {}", sent, after.rails[i].rank, payload));
    }
  });
}

/// Ranks without a core each drive the network themselves if it is memory (not over TCP). The test forces this on every
/// machine.
class NodesOnOneCore : public Nodes {
 protected:
  void SetUp() override {
    ASSERT_EQ(sched_getaffinity(0, sizeof before_, &before_), 0);
    cpu_set_t one;
    CPU_ZERO(&one);
    for (std::size_t core = 0; core < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++core) {
      if (CPU_ISSET(core, &before_)) CPU_SET(core, &one);
    }
    ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  }
  void TearDown() override { sched_setaffinity(0, sizeof before_, &before_); }

 private:
  cpu_set_t before_{};
};

TEST_P(NodesOnOneCore, RandomExchangesAreTheOracles) {
  std::mt19937_64 random(static_cast<std::uint64_t>(78 + GetParam().num_ranks()));
  std::vector<PreparedCase> cases;
  for (int i = 0; i < 10; ++i) cases.push_back(prepare_on_nodes(draw_case(random, GetParam().num_ranks())));
  run([&](RankContext& context, Group& group) {
    for (const PreparedCase& one : cases) check_case(context, group, one);
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, NodesOnOneCore,
                         testing::Values(NodeShape{2, 1, "loopback"}, NodeShape{3, 2, "loopback"},
                                         NodeShape{2, 1, "ucx"}, NodeShape{2, 2, "ucx", true}),
                         shape_name);
INSTANTIATE_TEST_SUITE_P(Shapes, Nodes, testing::ValuesIn(node_shapes()), shape_name);
INSTANTIATE_TEST_SUITE_P(SharedMemory, Nodes,
                         testing::Values(NodeShape{2, 2, "ucx", true}, NodeShape{3, 1, "ucx", true}), shape_name);
INSTANTIATE_TEST_SUITE_P(Shapes, LargeExchange,
                         testing::Values(NodeShape{2, 2, "loopback"}, NodeShape{3, 1, "loopback"},
                                         NodeShape{2, 2, "ucx"}, NodeShape{3, 1, "ucx"}, NodeShape{2, 2, "ucx", true},
                                         NodeShape{2, 2, "loopback", false, true}),
                         shape_name);

}  // namespace
}  // namespace ferry::test
