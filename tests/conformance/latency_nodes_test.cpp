#include <gtest/gtest.h>

#include <random>

#include "conformance/node_shape.hpp"
#include "support/latency_check.hpp"
#include "support/latency_sequence.hpp"
#include "support/loopback_faults.hpp"

/// Latency mode on groups of several nodes, in every shape that a group can have.

namespace ferry::test {
namespace {

std::vector<PreparedCase> random_latency_cases(const NodeShape& shape, int count, std::uint64_t seed) {
  std::mt19937_64 random(seed + static_cast<std::uint64_t>(shape.num_ranks()));
  std::vector<PreparedCase> cases;
  for (int i = 0; i < count; ++i) {
    cases.push_back(prepare_on(shape, draw_latency_case(random, shape.num_ranks(), !shape.verify)));
  }
  return cases;
}

class LatencyNodes : public testing::TestWithParam<NodeShape> {};

TEST_P(LatencyNodes, WholeAndInHalvesAndInRandomSequences) {
  constexpr int kNumSteps = 60;
  const std::vector<PreparedCase> cases = random_latency_cases(GetParam(), 10, 700);
  std::mt19937_64 random(701);
  std::vector<PreparedCase> others;
  for (int i = 0; i < 3; ++i) others.push_back(prepare_on(GetParam(), draw_case(random, GetParam().num_ranks())));
  run_on_nodes(GetParam(), [&](RankContext& context, Group& group) {
    for (std::size_t i = 0; i < cases.size(); ++i) {
      check_latency_case(context, group, cases[i], i % 2 == 0 ? Halves::kTogether : Halves::kSplit);
    }
    LatencySequence sequence(context, group, cases, others, 702);
    for (int step = 0; step < kNumSteps; ++step) {
      if (!sequence.step()) return;
    }
    sequence.finish_all();
  });
}

class LatencyLongRows : public testing::TestWithParam<NodeShape> {};

/// Rows longer than a chunk of any ring are sent in slices, which forwarders sum.
TEST_P(LatencyLongRows, AreSummedInSlices) {
  ExchangeCase spec;
  spec.name = "long rows";
  spec.world = {.num_topk = 4, .num_experts = 2 * GetParam().num_ranks() + 1, .max_tokens = 2};
  spec.world.layout = Layout::kSlab;
  spec.dispatches = {{.hidden = 132000, .num_scales = 7}, {.hidden = 132000, .quantize = Quantization::kFp8}};
  spec.combines = {{.dtype = DType::kFloat32, .hidden = 66000, .weighted = true, .order = CombineOrder::kRankSums},
                   {.hidden = 132000, .weighted = true, .order = CombineOrder::kRankSums},
                   {.hidden = 132000, .weighted = true},
                   {.hidden = 132096,
                    .weighted = true,
                    .order = CombineOrder::kRankSums,
                    .values = Values::kBlocks,
                    .wire_format = WireFormat::kFp8}};
  const PreparedCase prepared = prepare_on(GetParam(), spec);
  run_on_nodes(GetParam(), [&](RankContext& context, Group& group) {
    check_latency_case(context, group, prepared, Halves::kSplit);
  });
}

class LatencyOverFaults : public testing::TestWithParam<NodeShape> {};

/// Uses a network with the latest and least ordered delivery that engine.hpp allows.
TEST_P(LatencyOverFaults, NoOrderButTheOneRule) {
  const std::vector<PreparedCase> cases = random_latency_cases(GetParam(), 4, 720);
  net::LoopbackFaults faults;
  faults.scramble(13);
  run_on_nodes(GetParam(), [&](RankContext& context, Group& group) {
    for (const PreparedCase& one : cases) check_latency_case(context, group, one, Halves::kSplit);
    LatencySequence sequence(context, group, cases, {}, 721);
    for (int step = 0; step < 12; ++step) {
      if (!sequence.step()) return;
    }
    sequence.finish_all();
  });
  EXPECT_GT(faults.counts().num_overtaken, 0U);
}

INSTANTIATE_TEST_SUITE_P(Shapes, LatencyNodes, testing::ValuesIn(node_shapes()), shape_name);
INSTANTIATE_TEST_SUITE_P(SharedMemory, LatencyNodes, testing::Values(NodeShape{2, 2, "ucx", true}), shape_name);
INSTANTIATE_TEST_SUITE_P(Shapes, LatencyLongRows, testing::Values(NodeShape{2, 2, "loopback"}, NodeShape{3, 1, "ucx"}),
                         shape_name);
INSTANTIATE_TEST_SUITE_P(Shapes, LatencyOverFaults, testing::Values(NodeShape{2, 2, "loopback"}), shape_name);

}  // namespace
}  // namespace ferry::test
