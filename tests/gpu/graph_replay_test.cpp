/// Route, dispatch and combine recorded once and replayed: each replay routes the current contents of the same memory.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "gpu/gpu_group.hpp"

namespace ferry::test {
namespace {

constexpr int kNumReplays = 5;
constexpr std::int64_t kNumTokens = 24;

struct Scenario {
  int num_ranks;
  Layout layout;
  MemoryKind memory;
  Quantization quantize = Quantization::kNone;
  std::int64_t num_replicas = -1;  ///< placement in the same memory, different in each replay
};

std::string describe(const Scenario& scenario) {
  constexpr std::array<const char*, 3> kLayouts = {"tokens", "experts", "slab"};
  return fmt::format("{}_threads_{}_{}{}", scenario.num_ranks, kLayouts[static_cast<std::size_t>(scenario.layout)],
                     scenario.memory == MemoryKind::kPlain ? "plain" : "symmetric",
                     scenario.quantize == Quantization::kNone ? "" : "_quantised") +
         (scenario.num_replicas < 0 ? "" : "_replicas");
}
void PrintTo(const Scenario& scenario, std::ostream* out) { *out << describe(scenario); }

std::vector<Scenario> scenarios() {
  std::vector<Scenario> all;
  for (int num_ranks : {1, 2, 4})
    for (Layout layout : {Layout::kTokens, Layout::kExperts, Layout::kSlab})
      for (MemoryKind memory : {MemoryKind::kSymmetric, MemoryKind::kPlain}) all.push_back({num_ranks, layout, memory});
  for (Layout layout : {Layout::kTokens, Layout::kExperts, Layout::kSlab})
    for (MemoryKind memory : {MemoryKind::kSymmetric, MemoryKind::kPlain})
      all.push_back({2, layout, memory, layout == Layout::kExperts ? Quantization::kInt8 : Quantization::kFp8});
  for (Layout layout : {Layout::kTokens, Layout::kExperts, Layout::kSlab})
    all.push_back({2, layout, MemoryKind::kSymmetric, Quantization::kNone, 6});
  return all;
}

/// Worlds of equal shapes: the same row bound for any routing, with patterns that need very different numbers of rows.
std::vector<PreparedCase> equal_shapes(const Scenario& scenario) {
  std::vector<PreparedCase> cases;
  for (int replay = 0; replay < kNumReplays; ++replay) {
    ExchangeCase one;
    one.name = fmt::format("replay {}", replay);
    one.world = {.num_ranks = scenario.num_ranks, .num_topk = 4, .num_experts = 10, .max_tokens = kNumTokens};
    one.world.layout = scenario.layout;
    one.world.expert_alignment = 4;
    one.world.pattern = static_cast<RoutingPattern>((replay * 3) % 5);
    one.world.seed = static_cast<std::uint64_t>(300 + replay);
    const std::int64_t all_tokens = kNumTokens * scenario.num_ranks;
    one.world.fixed_rows = scenario.layout == Layout::kExperts ? all_tokens * 4 + 64 : all_tokens;
    one.memory = scenario.memory;
    one.world.num_replicas = scenario.num_replicas;
    one.table_on_device = true;
    one.dispatches = {{.hidden = 264, .num_scales = 3, .zero_padding = true}};
    if (scenario.quantize != Quantization::kNone) {
      one.dispatches = {{.hidden = 272, .quantize = scenario.quantize, .zero_padding = true}};
    }
    one.combines = {{.hidden = 264, .weighted = true, .num_biases = 1, .return_weights = true}};
    cases.push_back(prepare(one));
  }
  return cases;
}

class GraphReplay : public testing::TestWithParam<Scenario> {};

TEST_P(GraphReplay, RoutesAnewWhatLiesInTheSameMemory) {
  const std::vector<PreparedCase> cases = equal_shapes(GetParam());
  run_gpu_group(RankKind::kThreads, GetParam().num_ranks, [&](RankContext& context, Group& group) {
    const RankStream stream(context);
    // A call outside the graph comes first, as in programs that warm up: it allocates the memory that stages plain
    // tensors and quantised rows.
    const bool stages = GetParam().memory == MemoryKind::kPlain || GetParam().quantize != Quantization::kNone;
    if (stages) check_case(context, group, cases.back());
    Round round(context, group, cases.front());
    round.keep_routing = true;
    meet(context);

    CapturedGraph graph;
    graph.begin(stream.get());
    const bool captured = round.start(context, group, stream.get());
    graph.end();
    if (!captured) return;
    graph.prepare();
    for (const PreparedCase& one : cases) {
      round.refill(context, one);
      meet(context);  // no rank prepares or fills while others wait inside a kernel
      graph.launch();
      if (!context.expect_ok(group.wait(stream.get()), one.spec.name)) return;
      round.expect_received(context);
      expect_routing(context, group, round.routing, one, Counts::kInMemory);
    }
    meet(context);
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, GraphReplay, testing::ValuesIn(scenarios()),
                         [](const auto& test) { return describe(test.param); });

/// Two graphs of one group, with other shapes and options, in turn and directly after each other.
TEST(GraphReplayOfTwo, InTurns) {
  for (const MemoryKind memory : {MemoryKind::kSymmetric, MemoryKind::kPlain}) {
    constexpr int kNumRanks = 2;
    const std::vector<PreparedCase> narrow = equal_shapes({kNumRanks, Layout::kTokens, memory});
    std::vector<PreparedCase> wide;
    for (const PreparedCase& one : equal_shapes({kNumRanks, Layout::kExperts, memory})) {
      ExchangeCase spec = one.spec;
      spec.world.seed += 100;
      spec.dispatches = {{.dtype = DType::kFloat32, .hidden = 1024, .zero_padding = true}};
      spec.combines = {{.dtype = DType::kFloat32, .hidden = 1024, .num_biases = 2}};
      wide.push_back(prepare(spec));
    }
    run_gpu_group(RankKind::kThreads, kNumRanks, [&](RankContext& context, Group& group) {
      const RankStream stream(context);
      // Memory for the larger of the two is allocated while the smaller one's graph already exists.
      if (memory == MemoryKind::kPlain) check_case(context, group, narrow.back());
      std::array<const std::vector<PreparedCase>*, 2> cases = {&narrow, &wide};
      std::array<Round, 2> rounds = {Round(context, group, narrow.front()), Round(context, group, wide.front())};
      std::array<CapturedGraph, 2> graphs;
      for (std::size_t i = 0; i < graphs.size(); ++i) {
        if (memory == MemoryKind::kPlain) check_case(context, group, cases[i]->back());
        rounds[i].keep_routing = true;
        meet(context);
        graphs[i].begin(stream.get());
        const bool captured = rounds[i].start(context, group, stream.get());
        graphs[i].end();
        if (!captured) return;
        graphs[i].prepare();
      }
      for (std::size_t replay = 0; replay < kNumReplays; ++replay) {
        for (std::size_t i = 0; i < graphs.size(); ++i) rounds[i].refill(context, (*cases[i])[replay]);
        meet(context);
        for (std::size_t turn = 0; turn < graphs.size(); ++turn) graphs[(replay + turn) % 2].launch();
        if (!context.expect_ok(group.wait(stream.get()), fmt::format("replay {}", replay))) return;
        for (std::size_t i = 0; i < graphs.size(); ++i) {
          rounds[i].expect_received(context);
          expect_routing(context, group, rounds[i].routing, (*cases[i])[replay], Counts::kInMemory);
        }
      }
      meet(context);
    });
  }
}

TEST(GraphReplayOverflow, IsToldAndTheNextReplayWorks) {
  constexpr int kNumRanks = 2;
  std::vector<PreparedCase> cases;
  for (RoutingPattern pattern : {RoutingPattern::kNone, RoutingPattern::kDuplicates}) {
    ExchangeCase one;
    one.name = "overflow";
    one.world = {.num_ranks = kNumRanks, .num_topk = 2, .num_experts = 4, .pattern = pattern};
    one.world.fixed_rows = 2 * one.world.max_tokens;
    one.dispatches = {{}};
    one.combines = {{}};
    cases.push_back(prepare(one));
  }
  // The same memory, but with room for fewer rows than the second routing needs.
  constexpr std::int64_t kTooFew = 3;
  run_gpu_group(RankKind::kThreads, kNumRanks, [&](RankContext& context, Group& group) {
    RouteArguments arguments(context, group, cases[0]);
    RouteOptions options = arguments.options();
    options.max_recv_rows = kTooFew;
    const TensorImage own(payload_rows(DType::kBfloat16, cases[0].num_tokens(context.rank()), 32, 0));
    const TensorImage recv(payload_rows(DType::kBfloat16, kTooFew, 32, 0));
    const TestTensor x(context, group, MemoryKind::kSymmetric, own);
    const TestTensor out(context, group, MemoryKind::kSymmetric, recv);
    const RankStream stream(context);
    meet(context);
    Routing routing;  // outlives the graph
    CapturedGraph graph;
    graph.begin(stream.get());
    const Status sent = [&] {
      const Result<Routing> routed = group.route(arguments.input(), options, stream.get());
      if (!routed.ok()) return routed.status();
      routing = *routed;
      return group.dispatch(routing, {x.view(), {}, {}}, {out.view(), {}, {}, {}, {}}, stream.get());
    }();
    graph.end();
    if (!context.expect_ok(sent, "capture")) return;
    graph.prepare();
    for (std::size_t which : {0U, 1U, 0U}) {
      arguments.refill(context, cases[which]);
      meet(context);
      graph.launch();
      const Status told = group.wait(stream.get());
      if (which == 0)
        context.expect_ok(told, "a replay that fits");
      else
        context.expect_code(told, ErrorCode::kCapacity, "a replay that does not fit");
      out.expect_equal(context, recv, "received rows");  // even the routing that fits sends no row
    }
    meet(context);
  });
}

}  // namespace
}  // namespace ferry::test
