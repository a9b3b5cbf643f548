#include <gtest/gtest.h>

#include <array>
#include <random>

#include "conformance/node_shape.hpp"
#include "support/exchange_check.hpp"
#include "support/loopback_faults.hpp"
#include "support/sanitizers.hpp"

/// Groups of several nodes against the oracle, over a network with the latest and least ordered delivery that
/// engine.hpp allows; it must not affect results.

namespace ferry::test {
namespace {

using net::LoopbackFaults;

constexpr int kNumRandomCases = kSanitized ? 8 : 20;
/// Fewest operations that a fault must affect for a run to be meaningful; actual runs have many times as many.
constexpr std::uint64_t kEnough = 50;

class NodesWithFaults : public testing::TestWithParam<NodeShape> {
 protected:
  static std::vector<PreparedCase> random_cases(std::uint64_t seed, int count) {
    std::mt19937_64 random(seed + static_cast<std::uint64_t>(GetParam().num_ranks()));
    std::vector<PreparedCase> cases;
    for (int i = 0; i < count; ++i) cases.push_back(prepare_on(GetParam(), draw_case(random, GetParam().num_ranks())));
    return cases;
  }

  /// Enough rows for many chunks, so that each channel sends values in sequence without waiting for an answer.
  static PreparedCase many_chunks() {
    ExchangeCase spec;
    spec.name = "many chunks";
    spec.world = {.num_topk = 2, .num_experts = 2 * GetParam().num_ranks(), .max_tokens = 24};
    spec.dispatches = {{.hidden = 32768, .num_scales = 3}};
    spec.combines = {{.hidden = 32768, .weighted = true, .return_weights = true}};
    return prepare_on(GetParam(), spec);
  }
};

/// Draws the delay of each node's traffic to this node anew for every case.
void draw_delays(LoopbackFaults& faults, const Topology& topology, std::mt19937_64& random) {
  constexpr std::array<int, 5> kPolls = {0, 1, 4, 12, 25};
  for (int from = 0; from < topology.num_nodes(); ++from) {
    faults.delay(from, topology.node_of(topology.rank), kPolls[random() % kPolls.size()]);
  }
}

/// Every order that this network makes NoOrderButTheOneRule may make too, on all shapes; here whole nodes are late.
class LateNodes : public NodesWithFaults {};

TEST_P(LateNodes, AndMixedChannels) {
  std::vector<PreparedCase> cases = random_cases(177, kNumRandomCases);
  cases.push_back(many_chunks());
  LoopbackFaults faults;
  faults.reorder(11);
  run_on_nodes(GetParam(), [&](RankContext& context, Group& group) {
    std::mt19937_64 random(static_cast<std::uint64_t>(context.rank()));
    for (const PreparedCase& one : cases) {
      if (group.topology().rail_of(context.rank()) == 0) draw_delays(faults, group.topology(), random);
      check_case(context, group, one);
    }
  });
  EXPECT_GT(faults.counts().num_delayed, kEnough);
  EXPECT_GT(faults.counts().num_overtaken, kEnough);
}

TEST_P(NodesWithFaults, NoOrderButTheOneRule) {
  std::vector<PreparedCase> cases = random_cases(277, kNumRandomCases);
  cases.push_back(many_chunks());
  LoopbackFaults faults;
  faults.scramble(12);
  run_on_nodes(GetParam(), [&](RankContext& context, Group& group) {
    for (const PreparedCase& one : cases) check_case(context, group, one);
  });
  EXPECT_GT(faults.counts().num_delayed, kEnough);
  EXPECT_GT(faults.counts().num_overtaken, kEnough);
  EXPECT_GT(faults.counts().num_stale_notifies, 0U);
}

INSTANTIATE_TEST_SUITE_P(Shapes, NodesWithFaults,
                         testing::Values(NodeShape{2, 2, "loopback"}, NodeShape{3, 3, "loopback"},
                                         NodeShape{4, 2, "loopback"}, NodeShape{8, 1, "loopback"},
                                         NodeShape{3, 2, "loopback", false, true}),
                         shape_name);
INSTANTIATE_TEST_SUITE_P(Shapes, LateNodes, testing::Values(NodeShape{3, 3, "loopback"}), shape_name);

}  // namespace
}  // namespace ferry::test
