/// Dispatches and their combines, with two micro-batches in flight, on emulated GPUs.

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "emulator/latency_combine.hpp"
#include "emulator/latency_dispatch.hpp"

namespace ferry::emulator {
namespace {

constexpr std::int64_t kLatencyBytes = std::int64_t{24} << 20;

/// One micro-batch of one layer.
struct Layer {
  Layer(LatencyRanks& ranks, const test::WorldSpec& world, const LatencyDispatchSpec& dispatched,
        const LatencyCombineSpec& combined, std::vector<std::int32_t> counts = {})
      : routing(ranks, test::make_world(world), world.max_tokens, std::move(counts)),
        dispatch(ranks, routing, dispatched),
        combine(ranks, routing, combined) {}

  LatencyRouting routing;
  LatencyDispatch dispatch;
  LatencyCombine combine;
};

/// Expects that no rank reported an error, and that all ranks have received and summed their data.
void expect_all_right(LatencyRanks& ranks, const std::vector<std::unique_ptr<Layer>>& layers) {
  for (int rank = 0; rank < ranks.num_ranks(); ++rank) {
    EXPECT_EQ(ranks.report(rank).lost.state, 0U);
    EXPECT_EQ(ranks.report(rank).fault.state, 0U);
    for (const auto& layer : layers) {
      EXPECT_EQ(layer->dispatch.compare(rank), "");
      EXPECT_EQ(layer->combine.compare(rank), "");
    }
  }
}

TEST(EmulatedLatencyLayer, TwoMicroBatchesInFlight) {
  constexpr int kWorlds = 5;
  constexpr std::size_t kRounds = 2;
  std::mt19937_64 random(31);
  for (int i = 0; i < kWorlds; ++i) {
    test::WorldSpec world{.num_ranks = 1 + i,
                          .num_topk = 1 + static_cast<int>(random() % 8),
                          .num_experts = 12,
                          .max_tokens = 1 + static_cast<std::int64_t>(random() % 6),
                          .pattern = i % 2 == 0 ? test::RoutingPattern::kDuplicates : test::RoutingPattern::kRandom,
                          .counts = test::TokenCounts::kUneven,
                          .layout = Layout::kSlab,
                          .custom_placement = true};
    LatencyRanks ranks({.num_ranks = world.num_ranks, .latency_bytes = kLatencyBytes, .seed = random()});
    std::vector<std::unique_ptr<Layer>> layers;
    for (std::size_t layer = 0; layer < 2 * kRounds; ++layer) {
      world.seed = random();
      LatencyDispatchSpec dispatch{.quantize = random() % 2 == 0 ? Quantization::kFp8 : Quantization::kNone};
      LatencyCombineSpec combine{.hidden = 264,
                                 .order = random() % 2 == 0 ? CombineOrder::kExact : CombineOrder::kRankSums,
                                 .own_weights = random() % 2 == 0,
                                 .seed = random()};
      layers.push_back(std::make_unique<Layer>(ranks, world, dispatch, combine));
    }
    for (std::size_t round = 0; round < kRounds; ++round) {
      Layer& a = *layers[2 * round];
      Layer& b = *layers[2 * round + 1];
      for (int rank = 0; rank < world.num_ranks; ++rank) {
        const bool in_order = random() % 2 == 0;
        a.dispatch.send(rank);
        b.dispatch.send(rank);
        a.dispatch.receive(rank);
        a.combine.send(rank);
        b.dispatch.receive(rank);
        if (in_order) a.combine.receive(rank);
        b.combine.run(rank);
        if (!in_order) a.combine.receive(rank);
      }
    }
    ASSERT_EQ(ranks.machine().run(), "") << "world " << i;
    SCOPED_TRACE("world " + std::to_string(i));
    expect_all_right(ranks, layers);
  }
}

/// Emulates graphs that are replayed with other numbers of tokens.
TEST(EmulatedLatencyLayer, TokensBeyondTheCountHaveNoExperts) {
  constexpr int kWorlds = 6;
  constexpr int kCalls = 3;
  std::mt19937_64 random(32);
  for (int i = 0; i < kWorlds; ++i) {
    const test::WorldSpec world{.num_ranks = 1 + i % 4,
                                .num_topk = 1 + static_cast<int>(random() % 8),
                                .num_experts = 12,
                                .max_tokens = 2 + static_cast<std::int64_t>(random() % 6),
                                .counts = i % 2 == 0 ? test::TokenCounts::kEven : test::TokenCounts::kUneven,
                                .layout = Layout::kSlab,
                                .seed = random()};
    LatencyRanks ranks({.num_ranks = world.num_ranks, .latency_bytes = kLatencyBytes, .seed = random()});
    std::vector<std::unique_ptr<Layer>> layers;
    for (int call = 0; call < kCalls; ++call) {
      std::vector<std::int32_t> counts;
      for (int rank = 0; rank < world.num_ranks; ++rank) {
        counts.push_back(static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(world.max_tokens + 2)) - 1);
      }
      const LatencyDispatchSpec dispatch{.quantize = call == 0 ? Quantization::kFp8 : Quantization::kNone,
                                         .zero_padding = call == 1,
                                         .wide_ids = call != 1,
                                         .num_blocks = 2 + static_cast<int>(random() % 5),
                                         .seed = random()};
      const LatencyCombineSpec combine{.order = random() % 2 == 0 ? CombineOrder::kExact : CombineOrder::kRankSums,
                                       .own_weights = random() % 2 == 0,
                                       .seed = random()};
      layers.push_back(std::make_unique<Layer>(ranks, world, dispatch, combine, counts));
      for (int rank = 0; rank < world.num_ranks; ++rank) {
        layers.back()->dispatch.run(rank);
        layers.back()->combine.run(rank);
      }
    }
    ASSERT_EQ(ranks.machine().run(), "") << "world " << i;
    SCOPED_TRACE("world " + std::to_string(i));
    expect_all_right(ranks, layers);
  }
}

TEST(EmulatedLatencyLayer, WordsOfCallsLongPastAreNotTakenForNewOnes) {
  constexpr int kNumRanks = 2;
  constexpr std::uint64_t kAhead = 5;
  LatencyRanks ranks({.num_ranks = kNumRanks,
                      .latency_bytes = kLatencyBytes,
                      .seed = 8,
                      .calls_before = std::uint64_t{1} << 33,
                      .words_ahead = kAhead});
  std::vector<std::unique_ptr<Layer>> layers;
  for (std::uint64_t call = 0; call < kAhead; ++call) {
    // Only the last call uses all of these words.
    const bool last = call + 1 == kAhead;
    const test::WorldSpec world{.num_ranks = kNumRanks, .max_tokens = last ? 6 : 1, .layout = Layout::kSlab};
    const LatencyCombineSpec combine{.order = CombineOrder::kRankSums, .own_weights = true, .num_blocks = last ? 5 : 2};
    layers.push_back(std::make_unique<Layer>(ranks, world, LatencyDispatchSpec{}, combine));
    for (int rank = 0; rank < kNumRanks; ++rank) {
      layers.back()->dispatch.run(rank);
      layers.back()->combine.run(rank);
    }
  }
  ASSERT_EQ(ranks.machine().run(), "");
  expect_all_right(ranks, layers);
}

TEST(EmulatedLatencyLayer, CombineOfARefusedDispatchIsRefusedWhoeverKnows) {
  constexpr int kNumRanks = 3;
  const test::WorldSpec world{.num_ranks = kNumRanks, .max_tokens = 6, .layout = Layout::kSlab};
  LatencyRanks ranks({.num_ranks = kNumRanks, .latency_bytes = kLatencyBytes, .seed = 3});
  Layer refused(ranks, world, {}, {});
  Layer good(ranks, world, {}, {});
  refused.dispatch.set_capacity(1);
  for (int rank = 0; rank < kNumRanks; ++rank) {
    refused.dispatch.run(rank);
    // Rank 0's host knows the reason; the others' kernels find it.
    if (rank == 0) {
      refused.combine.refuse(rank);
    } else {
      refused.combine.run(rank);
    }
    good.dispatch.run(rank);
    good.combine.run(rank);
  }
  ASSERT_EQ(ranks.machine().run(), "");
  for (int rank = 0; rank < kNumRanks; ++rank) {
    EXPECT_EQ(ranks.report(rank).lost.state, 0U);
    EXPECT_EQ(ranks.report(rank).fault.fault, static_cast<std::int32_t>(cuda::Fault::kSlabCapacity));
    EXPECT_TRUE(refused.combine.is_untouched(rank));
    EXPECT_EQ(good.dispatch.compare(rank), "");
    EXPECT_EQ(good.combine.compare(rank), "");
  }
}

/// Wait times that a program requested: they include the whole wait, also one that ends before its thread reads the
/// clock.
TEST(EmulatedLatencyLayer, WhatACallWaitsForIsAddedToItsEnd) {
  constexpr int kNumRanks = 3;
  constexpr int kLate = 1;
  // One step of the machine's clock.
  constexpr std::int64_t kLateNs = 10'000'000'000;
  std::mt19937_64 random(36);
  for (const CombineOrder order : {CombineOrder::kExact, CombineOrder::kRankSums}) {
    for (const bool halves : {false, true}) {
      LatencyRanks ranks(
          {.num_ranks = kNumRanks, .latency_bytes = kLatencyBytes, .seed = random(), .counts_waits = true});
      const test::WorldSpec world{.num_ranks = kNumRanks,
                                  .num_topk = 4,
                                  .num_experts = 12,
                                  .max_tokens = 6,
                                  .layout = Layout::kSlab,
                                  .seed = random()};
      std::vector<std::unique_ptr<Layer>> layers;
      layers.push_back(std::make_unique<Layer>(ranks, world, LatencyDispatchSpec{.seed = random()},
                                               LatencyCombineSpec{.order = order, .seed = random()}));
      Layer& layer = *layers.back();
      std::int64_t expected_ns = 0;
      const auto expect_times = [&](const char* call) {
        ASSERT_EQ(ranks.machine().run(), "");
        for (int rank = 0; rank < kNumRanks; ++rank) {
          for (int other = 0; other < kNumRanks; ++other) {
            const bool waits = rank != kLate && other == kLate;
            EXPECT_EQ(ranks.wait_time_ns(rank, other), waits ? expected_ns : 0)
                << call << ": rank " << rank << " for " << other;
          }
        }
      };
      ranks.delay(kLate, kLateNs);
      for (int rank = 0; rank < kNumRanks; ++rank) {
        if (halves) layer.dispatch.send(rank);
        ranks.time(rank, [&] { return halves ? layer.dispatch.receive(rank) : layer.dispatch.run_whole(rank); });
      }
      expected_ns += kLateNs;
      expect_times("dispatch");
      ranks.delay(kLate, kLateNs);
      for (int rank = 0; rank < kNumRanks; ++rank) {
        if (halves) layer.combine.send(rank);
        ranks.time(rank, [&] { return halves ? layer.combine.receive(rank) : layer.combine.run_whole(rank); });
      }
      expected_ns += kLateNs;
      expect_times("combine");
      expect_all_right(ranks, layers);
    }
  }
}

/// Includes a wait that ends after a few polls, some of which kernels make before they wait.
TEST(EmulatedLatencyLayer, WhatACallWaitsForIsAddedHoweverShortItIs) {
  constexpr int kNumRanks = 2;
  constexpr int kLate = 1;
  // Less time than the polls of all threads take, at 1 ns each.
  constexpr std::int64_t kLateNs = 8000;
  std::mt19937_64 random(37);
  for (const bool halves : {false, true}) {
    LatencyRanks ranks(
        {.num_ranks = kNumRanks, .latency_bytes = kLatencyBytes, .seed = random(), .counts_waits = true});
    ranks.machine().let_looks_take(1);
    const test::WorldSpec world{.num_ranks = kNumRanks,
                                .num_topk = 4,
                                .num_experts = 12,
                                .max_tokens = 6,
                                .layout = Layout::kSlab,
                                .seed = random()};
    LatencyRouting routing(ranks, test::make_world(world), world.max_tokens, {});
    LatencyDispatch dispatch(ranks, routing, LatencyDispatchSpec{.seed = random()});
    ranks.delay(kLate, kLateNs);
    for (int rank = 0; rank < kNumRanks; ++rank) {
      if (halves) dispatch.send(rank);
      ranks.time(rank, [&] { return halves ? dispatch.receive(rank) : dispatch.run_whole(rank); });
    }
    ASSERT_EQ(ranks.machine().run(), "");
    for (int rank = 0; rank < kNumRanks; ++rank) {
      EXPECT_EQ(dispatch.compare(rank), "");
      EXPECT_EQ(ranks.wait_time_ns(rank, rank), 0);
    }
    // The others' kernels may begin late, and the late rank's may send late.
    EXPECT_GE(ranks.wait_time_ns(1 - kLate, kLate), kLateNs / 2) << (halves ? "halves" : "whole");
    EXPECT_LE(ranks.wait_time_ns(1 - kLate, kLate), 2 * kLateNs) << (halves ? "halves" : "whole");
  }
}

/// Time counts once, however many threads wait.
TEST(EmulatedLatencyLayer, ARankThatIsLateShowsInTheWaitsOfTheOthers) {
  constexpr int kNumRanks = 3;
  constexpr int kLate = 1;
  constexpr int kCalls = 2;
  // Two steps of the machine's clock, between which threads read it.
  constexpr std::uint64_t kLateNs = 20'000'000'000;
  std::mt19937_64 random(35);
  LatencyRanks ranks({.num_ranks = kNumRanks, .latency_bytes = kLatencyBytes, .seed = random()});
  std::vector<std::unique_ptr<Layer>> layers;
  const auto add_layer = [&] {
    const test::WorldSpec world{.num_ranks = kNumRanks,
                                .num_topk = 4,
                                .num_experts = 12,
                                .max_tokens = 6,
                                .layout = Layout::kSlab,
                                .seed = random()};
    layers.push_back(std::make_unique<Layer>(ranks, world, LatencyDispatchSpec{.seed = random()},
                                             LatencyCombineSpec{.seed = random()}));
    for (int rank = 0; rank < kNumRanks; ++rank) {
      layers.back()->dispatch.run(rank);
      layers.back()->combine.run(rank);
    }
    EXPECT_EQ(ranks.machine().run(), "");
  };
  const auto wait_ns = [&ranks](int rank, int other) { return ranks.report(rank).waits.steps_ns[other]; };
  add_layer();
  for (int rank = 0; rank < kNumRanks; ++rank) {
    for (int other = 0; other < kNumRanks; ++other) EXPECT_EQ(wait_ns(rank, other), 0U) << rank << " for " << other;
  }
  for (std::uint64_t calls = 1; calls <= kCalls; ++calls) {
    ranks.delay(kLate, kLateNs);
    add_layer();
    for (int rank = 0; rank < kNumRanks; ++rank) {
      for (int other = 0; other < kNumRanks; ++other) {
        SCOPED_TRACE(std::to_string(rank) + " for " + std::to_string(other));
        if (rank == kLate || other == rank) {
          EXPECT_EQ(wait_ns(rank, other), 0U);
        } else if (other == kLate) {
          EXPECT_GE(wait_ns(rank, other), calls * kLateNs / 2);
          EXPECT_LE(wait_ns(rank, other), calls * kLateNs);
        }
      }
    }
  }
  expect_all_right(ranks, layers);
}

}  // namespace
}  // namespace ferry::emulator
