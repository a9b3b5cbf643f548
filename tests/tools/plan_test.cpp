/// `ferry plan`: rows and bytes are those of routing, terms add up and name what limits.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "common/routing_source.hpp"
#include "ferry/group.hpp"
#include "planning/load.hpp"
#include "planning/model.hpp"
#include "planning/rates.hpp"
#include "planning/shape.hpp"
#include "report/wire.hpp"
#include "tools/running_command.hpp"

namespace ferry::testing {
namespace {

using ::testing::AllOf;
using ::testing::Ge;
using ::testing::Le;
using tools::CallPlan;
using tools::Json;
using tools::PlanDType;
using tools::PlanRings;
using tools::PlanShape;
using tools::Rate;
using tools::Rates;

PlanShape on_nodes(int num_nodes, int ranks_per_node = 8) {
  PlanShape shape;
  shape.num_nodes = num_nodes;
  shape.ranks_per_node = ranks_per_node;
  return shape;
}

Rates h100() { return tools::find_rates("h100").value(); }

Rates with(Rate Rates::*rate, double value) {
  Rates rates = h100();
  (rates.*rate).value = value;
  return rates;
}

auto about(double value, double share) { return AllOf(Ge(value * (1 - share)), Le(value * (1 + share))); }

/// Rows that a rank sends to other nodes and that a rank receives, at the mean over ranks, by the ids of all of them.
struct CountedRows {
  double sent = 0;
  double received = 0;
};

CountedRows count_rows(const PlanShape& shape, const std::function<std::vector<std::int64_t>(int)>& ids_of) {
  const tools::WireShape wire{shape.num_ranks(), shape.ranks_per_node, shape.num_experts, shape.num_topk};
  CountedRows rows;
  for (int rank = 0; rank < shape.num_ranks(); ++rank) {
    const std::vector<std::int64_t> ids = ids_of(rank);
    rows.sent += static_cast<double>(tools::count_rows_to_other_nodes(ids, wire, rank));
    for (auto token = ids.begin(); token != ids.end(); token += shape.num_topk) {
      std::set<std::int64_t> owners;
      for (auto id = token; id != token + shape.num_topk; ++id) {
        owners.insert(tools::owner_of(*id, shape.num_experts, shape.num_ranks()));
      }
      rows.received += static_cast<double>(owners.size());
    }
  }
  rows.sent /= shape.num_ranks();
  rows.received /= shape.num_ranks();
  return rows;
}

void expect_rows(const PlanShape& shape, const CountedRows& counted) {
  const tools::Traffic traffic = tools::traffic_of(shape, shape.num_tokens, 1);
  EXPECT_THAT(traffic.items_sent, about(counted.sent, 0.01)) << shape.num_nodes << " nodes";
  EXPECT_THAT(traffic.rows_received, about(counted.received, 0.01)) << shape.num_nodes << " nodes";
}

TEST(PlanRows, AreThoseOfRandomRouting) {
  for (PlanShape shape : {on_nodes(2, 2), on_nodes(4, 2), on_nodes(8, 4)}) {
    shape.num_tokens = 8192 / shape.num_ranks();
    shape.num_experts = 64;
    shape.num_topk = 6;
    expect_rows(shape, count_rows(shape, [&shape](int rank) {
                  const tools::RoutingShape routing{shape.num_tokens, shape.num_topk, shape.num_experts};
                  return tools::make_routing(tools::RoutingKind::kRandom, routing, 7, rank).topk_idx;
                }));
  }
}

TEST(PlanRows, AreThoseOfNodeLimitedRouting) {
  PlanShape shape = on_nodes(8, 4);
  shape.num_tokens = 512;
  shape.node_limit = 3;
  const std::int64_t node_experts = shape.num_experts / shape.num_nodes;
  expect_rows(shape, count_rows(shape, [&](int rank) {
                std::mt19937 random(static_cast<unsigned>(rank));
                std::vector<std::int64_t> nodes(static_cast<std::size_t>(shape.num_nodes));
                std::iota(nodes.begin(), nodes.end(), 0);
                std::vector<std::int64_t> ids;
                for (std::int64_t token = 0; token < shape.num_tokens; ++token) {
                  std::shuffle(nodes.begin(), nodes.end(), random);
                  std::vector<std::int64_t> experts;
                  for (int i = 0; i < shape.node_limit; ++i) {
                    for (std::int64_t e = 0; e < node_experts; ++e) {
                      experts.push_back(nodes[static_cast<std::size_t>(i)] * node_experts + e);
                    }
                  }
                  std::shuffle(experts.begin(), experts.end(), random);
                  ids.insert(ids.end(), experts.begin(), experts.begin() + shape.num_topk);
                }
                return ids;
              }));
}

TEST(PlanRows, OfUnevenRoutingAreThoseOfTheBusiestRank) {
  PlanShape shape = on_nodes(2, 2);
  shape.num_tokens = 50;
  shape.num_experts = 32;
  shape.num_topk = 4;
  const TemporaryFile one_token(R"({"type": "meta", "num_experts": 32, "topk": 4}
{"topk_ids": [0, 1, 2, 3], "topk_weights": [1, 1, 1, 1]}
)");
  // All tokens go to rank 0: those of ranks 2 and 3 over the network, those of ranks 1 and 3 out of rank 1's memory.
  for (const std::string& routing : {std::string("one-hot"), "trace:" + one_token.path()}) {
    const Result<tools::PlanLoad> load = tools::busiest_load(shape, routing, 1);
    ASSERT_TRUE(load.ok()) << load.status().to_string();
    PlanShape uneven = shape;
    uneven.load = *load;
    const tools::Traffic traffic = tools::traffic_of(uneven, shape.num_tokens, 1);
    EXPECT_DOUBLE_EQ(traffic.items_sent, 50);
    EXPECT_DOUBLE_EQ(traffic.items_held, 100);
    EXPECT_DOUBLE_EQ(traffic.rows_received, 200);
    EXPECT_DOUBLE_EQ(traffic.rows_over_links, 100);
    EXPECT_DOUBLE_EQ(traffic.entries, 800);
  }
}

TEST(PlanBytes, AreThoseThatABenchSends) {
  for (const char* dtype : {"bf16", "fp8"}) {
    const TemporaryFile bench;
    const CommandEnd measured =
        run_ferry({"bench",   "--backend",   "cpu",      "--nodes",   "2",         "--ranks",  "4",   "--launch",
                   "threads", "--transport", "loopback", "--op",      "dispatch",  "--tokens", "512", "--hidden",
                   "512",     "--topk",      "4",        "--experts", "32",        "--dtype",  dtype, "--iterations",
                   "1",       "--warmup",    "0",        "--json",    bench.path()});
    ASSERT_EQ(measured.exit_code, 0) << measured.standard_output << measured.standard_error;
    const CommandEnd end = run_ferry({"plan", "--compare", bench.path(), "--json", "-"});
    ASSERT_EQ(end.exit_code, 0) << end.standard_error;
    const Json report = Json::parse(end.standard_output);
    ASSERT_EQ(report["comparisons"].size(), 1U);
    EXPECT_EQ(report["comparisons"][0]["unit"], "bytes");
    EXPECT_THAT(report["comparisons"][0]["ratio"].get<double>(), about(1.0, 0.02));
  }
}

TEST(PlanBytes, AreThoseOfTheArithmeticForEightNodes) {
  const CallPlan dispatch = tools::plan_dispatch(on_nodes(8), h100());
  EXPECT_THAT(dispatch.network_bytes, about(271e6, 0.01));  // docs/performance-nodes.md
  EXPECT_THAT(dispatch.link_bytes, about(446e6 * 7 / 8, 0.02));
  EXPECT_EQ(dispatch.limit().name, "host memory");
  EXPECT_THAT(dispatch.limit().us, about(14500, 0.01));
}

TEST(PlanTimes, AreTheSumOfWhatAddsAndTheLongestOfWhatOverlaps) {
  CallPlan call{"call", {}, 0, 0};
  call.terms = {{"a", 5, 0, false, {}}, {"b", 30, 0, true, {}}, {"c", 20, 0, true, {}}, {"d", 7, 0, false, {}}};
  EXPECT_DOUBLE_EQ(call.time_us(), 42);
  EXPECT_EQ(call.limit().name, "b");
}

TEST(PlanTimes, GrowWithTheWork) {
  const auto times = [](const PlanShape& shape) {
    std::vector<double> all;
    for (const CallPlan& call : tools::plan_calls(shape, h100())) all.push_back(call.time_us());
    return all;
  };
  for (const int num_nodes : {1, 2, 8, 32}) {
    const PlanShape shape = on_nodes(num_nodes);
    const std::vector<double> before = times(shape);
    PlanShape more = shape;
    more.num_tokens *= 2;
    more.latency_tokens *= 2;
    const std::vector<double> after = times(more);
    for (std::size_t i = 0; i < before.size(); ++i) EXPECT_GT(after[i], before[i]) << num_nodes << " nodes, call " << i;
    PlanShape narrow = shape;
    narrow.dtype = PlanDType::kFp8;
    EXPECT_LT(times(narrow)[1], before[1]);
    EXPECT_EQ(times(narrow)[2], before[2]) << "combine returns bf16";
  }
}

TEST(PlanTimes, FollowTheTopology) {
  double before = 0;
  for (const int num_nodes : {2, 4, 8, 16, 32}) {
    const double sent = tools::plan_dispatch(on_nodes(num_nodes), h100()).network_bytes;
    EXPECT_GT(sent, before) << num_nodes << " nodes";
    before = sent;
    PlanShape limited = on_nodes(num_nodes);
    limited.node_limit = 2;
    EXPECT_LE(tools::plan_dispatch(limited, h100()).network_bytes, sent) << num_nodes << " nodes";
  }
  PlanShape gpu_rings = on_nodes(8);
  gpu_rings.rings = PlanRings::kGpu;
  EXPECT_LT(tools::plan_dispatch(gpu_rings, h100()).time_us(), tools::plan_dispatch(on_nodes(8), h100()).time_us());
}

/// A message to each rank of other nodes: counts and rows, or the rows that come back.
TEST(PlanFarRanks, GetAMessageEachOfTheRowsThatTheyNeed) {
  PlanShape shape = on_nodes(2, 2);
  shape.latency_tokens = 8;
  shape.num_topk = 1;
  shape.dtype = PlanDType::kFp8;
  const tools::FarTraffic far = tools::far_traffic_of(shape);
  EXPECT_EQ(far.num_messages, 2);
  // With one expert a token a quarter of the 8 tokens goes to each rank.
  EXPECT_THAT(far.dispatch.bytes, about(2 * (256 + 16 * 86 + 8 * 16 * 2 + 2 * (7168 + 224)), 0.001));
  EXPECT_THAT(far.combine.bytes, about(2 * (256 + 2 * 14336), 0.001));
  shape.num_topk = 8;
  const double exact = tools::far_traffic_of(shape).combine.bytes;
  EXPECT_THAT(exact, about(2 * (256 + 8 * 2 * 14336), 0.001)) << "a row for each (token, expert)";
  shape.order = CombineOrder::kRankSums;
  EXPECT_LT(tools::far_traffic_of(shape).combine.bytes, 0.5 * exact) << "a row for each (token, rank)";
  shape.rings = PlanRings::kGpu;
  const double rows = tools::far_traffic_of(shape).combine.bytes - 2 * 256;
  shape.latency_tokens = 256;  // more than travel as words
  EXPECT_THAT(rows * 32, about(1.5 * (tools::far_traffic_of(shape).combine.bytes - 2 * 256), 0.001));
}

/// As kernels decide it (src/cuda/latency/far_message.hpp).
TEST(PlanFarRanks, GetSumsAsWordsUpToTheirTokensAndBytes) {
  struct Case {
    int num_nodes;
    std::int64_t tokens;
    bool fp8_sums;
    bool words;
  };
  for (const Case& sums : {Case{2, 64, false, true}, Case{2, 65, false, false}, Case{2, 128, true, true},
                           Case{2, 129, true, false}, Case{4, 48, false, true}, Case{4, 49, false, false},
                           Case{16, 32, false, true}, Case{16, 33, false, false}, Case{16, 1, true, false}}) {
    PlanShape shape = on_nodes(sums.num_nodes, 1);
    shape.latency_tokens = sums.tokens;
    shape.order = CombineOrder::kRankSums;
    shape.rings = PlanRings::kGpu;
    shape.fp8_sums = sums.fp8_sums;
    const tools::FarTraffic far = tools::far_traffic_of(shape);
    EXPECT_EQ(far.combine.words, sums.words) << sums.num_nodes << " nodes, " << sums.tokens << " tokens";
    EXPECT_EQ(far.combine.small, sums.words && sums.num_nodes <= 8);
    EXPECT_EQ(far.dispatch.words, sums.tokens <= 32);
  }
}

TEST(PlanFarRanks, AreLimitedByTheRateThatIsTooSlow) {
  struct Case {
    Rate Rates::*rate;
    double value;
    const char* limit;
  };
  for (const Case& slow :
       {Case{&Rates::network_gbit, 1, "wire"}, Case{&Rates::ring_gbps, 1, "PCIe, out and in"},
        Case{&Rates::host_memory_gbps, 10, "host memory"}, Case{&Rates::network_us, 50'000, "network, first message"},
        Case{&Rates::far_message_us, 5'000, "driver, other messages"},
        Case{&Rates::far_word_us, 5'000, "words over PCIe"},
        Case{&Rates::far_combine_us, 5'000, "kernels for far ranks"}}) {
    EXPECT_EQ(tools::plan_latency_combine(on_nodes(4), with(slow.rate, slow.value)).limit().name, slow.limit);
  }
  PlanShape in_gpu = on_nodes(4);
  in_gpu.rings = PlanRings::kGpu;
  EXPECT_LT(tools::plan_latency_combine(in_gpu, h100()).time_us(),
            tools::plan_latency_combine(on_nodes(4), h100()).time_us());
}

TEST(PlanLimits, AreTheRateThatIsTooSlow) {
  struct Case {
    Rate Rates::*rate;
    double value;
    const char* limit;
  };
  for (const Case& slow : {Case{&Rates::network_gbit, 1, "wire"}, Case{&Rates::host_memory_gbps, 10, "host memory"},
                           Case{&Rates::ring_gbps, 1, "kernels at rings, PCIe"},
                           Case{&Rates::proxy_chunk_us, 500, "proxy"}, Case{&Rates::nvlink_pull_gbps, 1, "NVLink"},
                           Case{&Rates::hbm_gbps, 1, "GPU memory"}, Case{&Rates::network_us, 50'000, "ring depth"}}) {
    EXPECT_EQ(tools::plan_combine(on_nodes(4), with(slow.rate, slow.value)).limit().name, slow.limit);
  }
  PlanShape few = on_nodes(1);
  few.num_sms = 2;
  EXPECT_EQ(tools::plan_dispatch(few, h100()).limit().name, "multiprocessors");
  EXPECT_EQ(tools::plan_dispatch(on_nodes(1), h100()).limit().name, "NVLink");
  PlanShape one_token = on_nodes(1);
  one_token.num_tokens = 1;
  EXPECT_EQ(tools::plan_dispatch(one_token, h100()).limit().name, "entry and end");
}

TEST(PlanMemory, IsWhatTheLibraryRequires) {
  const auto required = [](const PlanShape& shape, double from_a_build_with_cuda) {
    const tools::Traffic traffic = tools::traffic_of(shape, shape.num_tokens, 1);
    const tools::RowBytes rows = tools::row_bytes(shape);
    MemoryShape memory;
    memory.backend = "cuda";
    memory.num_ranks = shape.num_ranks();
    memory.ranks_per_node = shape.ranks_per_node;
    memory.num_experts = shape.num_experts;
    memory.num_tokens = shape.num_tokens;
    memory.num_topk = shape.num_topk;
    memory.num_recv_rows = static_cast<std::int64_t>(traffic.rows_received);
    memory.row_bytes = rows.combine;
    memory.weights = true;
    if (shape.num_nodes > 1) {
      const auto held = static_cast<std::int64_t>(traffic.items_held);
      memory.num_node_tokens = std::min(shape.num_tokens, held / shape.num_nodes);
      memory.num_forwarded_tokens = held - memory.num_node_tokens;
      memory.num_node_entries = memory.num_recv_rows;
    }
    const Result<std::size_t> bytes = bytes_required(memory);
    if (bytes) return static_cast<double>(*bytes);
    EXPECT_EQ(bytes.status().code(), ErrorCode::kUnsupported) << bytes.status().to_string();
    return from_a_build_with_cuda;
  };
  const auto planned = [](const PlanShape& shape) {
    const tools::PlanMemory memory = tools::memory_of(shape);
    return memory.gpu_bytes() + memory.host_rings;  // the library counts both
  };
  EXPECT_THAT(planned(on_nodes(1, 4)), about(required(on_nodes(1, 4), 485'838'848), 0.01));
  EXPECT_THAT(planned(on_nodes(8)), about(required(on_nodes(8), 1'808'064'192), 0.01));
  EXPECT_EQ(tools::ring_bytes(1), 0);  // these three: docs/nodes.md
  EXPECT_EQ(tools::ring_bytes(2), std::int64_t{16} << 20);
  EXPECT_EQ(tools::ring_bytes(8), std::int64_t{112} << 20);
  EXPECT_THAT(static_cast<double>(tools::ring_bytes(32)), about(128 << 20, 0.001));
  EXPECT_EQ(tools::ring_bytes(8, PlanRings::kGpu), std::int64_t{224} << 20);
}

}  // namespace
}  // namespace ferry::testing
