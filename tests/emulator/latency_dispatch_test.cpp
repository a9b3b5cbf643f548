/// Dispatch of latency mode on emulated GPUs must give the oracle's bytes and Routings in every order of blocks and
/// ranks.

#include "emulator/latency_dispatch.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <vector>

namespace ferry::emulator {
namespace {

using cuda::Fault;
using cuda::LatencyKind;

constexpr std::int64_t kLatencyBytes = std::int64_t{24} << 20;

LatencyDispatchSpec draw_dispatch(std::mt19937_64& random) {
  constexpr std::int64_t kHidden[] = {16, 128, 144, 1040, 2048};
  constexpr Quantization kModes[] = {Quantization::kNone, Quantization::kFp8, Quantization::kFp8PowerOfTwo,
                                     Quantization::kFp8Ue8m0, Quantization::kInt8};
  LatencyDispatchSpec spec;
  spec.hidden = kHidden[random() % std::size(kHidden)];
  spec.quantize = kModes[random() % std::size(kModes)];
  const bool narrow = random() % 2 == 0;
  if (spec.quantize == Quantization::kFp8Ue8m0) spec.scale_dtype = narrow ? DType::kUint8 : DType::kInt32;
  if (spec.quantize == Quantization::kNone) {
    spec.scale_dtype = narrow ? DType::kUint8 : DType::kFloat32;
    spec.num_scales = static_cast<int>(random() % 2 * (1 + random() % 70));
  }
  spec.column_major = random() % 2 == 0;
  spec.zero_padding = random() % 3 == 0;
  spec.wide_ids = random() % 2 == 0;
  spec.placed = random() % 3 == 0;
  spec.gap_bytes = static_cast<std::int64_t>(random() % 2) * 16;
  spec.num_blocks = 2 + static_cast<int>(random() % 9);
  spec.warps_per_row = 1 << random() % 4;
  if (!spec.zero_padding && spec.num_blocks > 3) spec.num_gap_blocks = static_cast<int>(random() % 3);
  spec.seed = random();
  const int num_others = spec.num_blocks - spec.num_gap_blocks - 1;
  spec.num_send_only = static_cast<int>(spec.seed % static_cast<std::uint64_t>(num_others));
  return spec;
}

void expect_no_report(LatencyRanks& ranks, int rank) {
  EXPECT_EQ(ranks.report(rank).lost.state, 0U) << "rank " << rank;
  EXPECT_EQ(ranks.report(rank).fault.state, 0U) << "rank " << rank << " fault " << ranks.report(rank).fault.fault;
}

TEST(EmulatedLatencyDispatch, ManyCallsGiveTheBytesOfTheOracle) {
  constexpr int kWorlds = 4;
  constexpr std::size_t kCalls = 4;
  std::mt19937_64 random(24);
  for (int i = 0; i < kWorlds; ++i) {
    test::WorldSpec world = draw_latency_world(random);
    world.weights = random() % 2 == 0;
    // Includes calls across the wrap of the lower half of the call number.
    LatencyRanks ranks({.num_ranks = world.num_ranks,
                        .latency_bytes = kLatencyBytes,
                        .seed = random(),
                        .calls_before = i % 4 == 0 ? (std::uint64_t{1} << 32) - 3 : 0});
    std::vector<std::unique_ptr<LatencyRouting>> routings;
    std::vector<std::unique_ptr<LatencyDispatch>> calls;
    for (std::size_t call = 0; call < kCalls; ++call) {
      world.seed = random();
      routings.push_back(std::make_unique<LatencyRouting>(ranks, test::make_world(world), world.max_tokens + i % 2));
      calls.push_back(std::make_unique<LatencyDispatch>(ranks, *routings.back(), draw_dispatch(random)));
      for (int rank = 0; rank < world.num_ranks; ++rank) {
        calls.back()->run(rank);
      }
    }
    ASSERT_EQ(ranks.machine().run(), "") << "world " << i;
    for (int rank = 0; rank < world.num_ranks; ++rank) {
      expect_no_report(ranks, rank);
      EXPECT_EQ(ranks.num_sent(rank, LatencyKind::kDispatch), kCalls);
      for (std::size_t call = 0; call < kCalls; ++call) {
        EXPECT_EQ(calls[call]->compare(rank), "") << "world " << i << " call " << call << " rank " << rank;
      }
    }
  }
}

/// Calls of few tokens have a separate kernel, which must give the same results as the others, also to peers that run
/// halves.
TEST(EmulatedLatencyDispatch, SmallCallsGiveTheBytesOfTheOracle) {
  constexpr int kWorlds = 6;
  constexpr std::size_t kCalls = 3;
  std::mt19937_64 random(42);
  for (int i = 0; i < kWorlds; ++i) {
    test::WorldSpec world = draw_latency_world(random);
    world.weights = random() % 2 == 0;
    world.num_experts = i % 6 == 5 ? 300 : world.num_experts;
    LatencyRanks ranks({.num_ranks = world.num_ranks,
                        .latency_bytes = kLatencyBytes,
                        .seed = random(),
                        .calls_before = i % 4 == 0 ? (std::uint64_t{1} << 32) - 3 : 0});
    std::vector<std::unique_ptr<LatencyRouting>> routings;
    std::vector<std::unique_ptr<LatencyDispatch>> calls;
    for (std::size_t call = 0; call < kCalls; ++call) {
      world.seed = random();
      const std::int64_t max_tokens = world.max_tokens + i % 2;
      world.spare_slab_rows = world.num_ranks * max_tokens;
      std::vector<std::int32_t> counts;
      for (int rank = 0; i % 3 == 0 && rank < world.num_ranks; ++rank) {
        counts.push_back(static_cast<std::int32_t>(random() % 12) - 1);
      }
      routings.push_back(std::make_unique<LatencyRouting>(ranks, test::make_world(world), max_tokens, counts));
      LatencyDispatchSpec spec = draw_dispatch(random);
      spec.zero_padding = spec.placed = false;
      const auto per_source = static_cast<int>((max_tokens * spec.warps_per_row + 15) / 16);
      spec.num_receivers = world.num_ranks * per_source + static_cast<int>(random() % 2);
      spec.num_gap_blocks = static_cast<int>(random() % 3);
      spec.num_blocks = 1 + std::max(static_cast<int>(max_tokens), spec.num_receivers) + spec.num_gap_blocks;
      spec.num_send_only = 0;
      calls.push_back(std::make_unique<LatencyDispatch>(ranks, *routings.back(), spec));
      for (int rank = 0; rank < world.num_ranks; ++rank) {
        ASSERT_TRUE(calls.back()->is_small(rank));
        calls.back()->run(rank);
      }
    }
    ASSERT_EQ(ranks.machine().run(), "") << "world " << i;
    for (int rank = 0; rank < world.num_ranks; ++rank) {
      expect_no_report(ranks, rank);
      EXPECT_EQ(ranks.num_sent(rank, LatencyKind::kDispatch), kCalls);
      for (std::size_t call = 0; call < kCalls; ++call) {
        EXPECT_EQ(calls[call]->compare(rank), "") << "world " << i << " call " << call << " rank " << rank;
      }
    }
  }
}

/// Each rank receives in its own order, and makes whole calls while others are in flight.
TEST(EmulatedLatencyDispatch, CallsInFlightAreReceivedInAnyOrder) {
  constexpr int kWorlds = 4;
  constexpr std::size_t kRounds = 2;
  constexpr std::size_t kPerRound = 3;
  std::mt19937_64 random(25);
  for (int i = 0; i < kWorlds; ++i) {
    test::WorldSpec world = draw_latency_world(random);
    world.weights = random() % 2 == 0;
    LatencyRanks ranks({.num_ranks = world.num_ranks, .latency_bytes = kLatencyBytes, .seed = random()});
    std::vector<std::unique_ptr<LatencyRouting>> routings;
    std::vector<std::unique_ptr<LatencyDispatch>> calls;
    for (std::size_t call = 0; call < kRounds * kPerRound; ++call) {
      world.seed = random();
      routings.push_back(std::make_unique<LatencyRouting>(ranks, test::make_world(world), world.max_tokens));
      calls.push_back(std::make_unique<LatencyDispatch>(ranks, *routings.back(), draw_dispatch(random)));
    }
    for (std::size_t round = 0; round < kRounds; ++round) {
      LatencyDispatch& a = *calls[round * kPerRound];
      LatencyDispatch& b = *calls[round * kPerRound + 1];
      LatencyDispatch& whole = *calls[round * kPerRound + 2];
      for (int rank = 0; rank < world.num_ranks; ++rank) {
        const std::uint64_t order = random();
        a.send(rank);
        if (order % 2 == 0) a.receive(rank);
        b.send(rank);
        if (order % 4 == 1) b.receive(rank);
        whole.run(rank);
        if (order % 4 != 1) b.receive(rank);
        if (order % 2 != 0) a.receive(rank);
      }
    }
    ASSERT_EQ(ranks.machine().run(), "") << "world " << i;
    for (int rank = 0; rank < world.num_ranks; ++rank) {
      expect_no_report(ranks, rank);
      for (const auto& call : calls) EXPECT_EQ(call->compare(rank), "") << "world " << i;
    }
  }
}

class EmulatedLatencyFaults : public ::testing::Test {
 protected:
  static constexpr int kNumRanks = 3;
  EmulatedLatencyFaults()
      : ranks_({.num_ranks = kNumRanks, .latency_bytes = kLatencyBytes, .seed = 5}),
        refused_routing_(ranks_, world(), 5),
        routing_(ranks_, world(), 5) {}

  static oracle::World world() {
    return test::make_world({.num_ranks = kNumRanks, .max_tokens = 5, .layout = Layout::kSlab});
  }
  /// Runs the queued calls, followed by a valid one.
  void run_to(LatencyDispatch& good) {
    for (int rank = 0; rank < kNumRanks; ++rank) {
      good.run(rank);
    }
    ASSERT_EQ(ranks_.machine().run(), "");
  }
  /// `refuser`: rank whose host has refused the call, and so gets no report; -1: none.
  void expect_fault(Fault fault, const LatencyDispatch& refused, const LatencyDispatch& good, int refuser = -1) {
    for (int rank = 0; rank < kNumRanks; ++rank) {
      const cuda::FaultReport& report = ranks_.report(rank).fault;
      EXPECT_EQ(ranks_.report(rank).lost.state, 0U);
      ASSERT_EQ(report.state, rank == refuser ? 0U : 1U) << "rank " << rank;
      if (rank != refuser) {
        EXPECT_EQ(report.fault, static_cast<std::int32_t>(fault));
      }
      EXPECT_TRUE(refused.is_untouched(rank));
      EXPECT_EQ(good.compare(rank), "");
    }
  }

  LatencyRanks ranks_;
  LatencyRouting refused_routing_;
  LatencyRouting routing_;
};

TEST_F(EmulatedLatencyFaults, RefusalsAndDisagreementsAreSeenByAll) {
  for (const bool refuses : {true, false}) {
    LatencyDispatch refused(ranks_, refused_routing_, {});
    LatencyDispatch good(ranks_, routing_, {});
    for (int rank = 0; rank < kNumRanks; ++rank) {
      ranks_.report(rank) = {};
      if (rank == 1 && refuses) {
        refused.refuse(rank);
      } else {
        refused.send_other(rank, rank == 1 ? 5 : 77);
        refused.receive_other(rank, rank == 1 ? 5 : 77);
      }
    }
    run_to(good);
    expect_fault(Fault::kDisagreement, refused, good, refuses ? 1 : -1);
    for (int rank = 0; rank < kNumRanks; ++rank) {
      if (refuses && rank == 1) continue;
      for (int peer = 0; peer < kNumRanks; ++peer) {
        EXPECT_EQ(ranks_.report(rank).fault.record_numbers[peer], 100 + peer);
      }
      EXPECT_EQ(refused_routing_.tables(rank).summary->valid, 0U);
    }
  }
}

TEST_F(EmulatedLatencyFaults, AnIdThatIsNoExpertIsSeenByAll) {
  LatencyDispatch refused(ranks_, refused_routing_, {});
  LatencyDispatch good(ranks_, routing_, {});
  constexpr std::size_t kEntry = 7;  // token 3 of K = 2
  refused.spoil_id(1, kEntry, 1000);
  refused.spoil_id(1, kEntry + 1, -2);
  refused.spoil_id(2, 0, -5);
  for (int rank = 0; rank < kNumRanks; ++rank) {
    refused.run(rank);
  }
  run_to(good);
  expect_fault(Fault::kBadId, refused, good);
  for (int rank = 0; rank < kNumRanks; ++rank) {
    const cuda::FaultReport& report = ranks_.report(rank).fault;
    EXPECT_EQ(report.rank, 1);
    EXPECT_EQ(report.row, 3);
    EXPECT_EQ(report.column, 1);
    EXPECT_EQ(report.value, 1000);
  }
}

/// The kernel for few tokens, with peers that run halves.
TEST_F(EmulatedLatencyFaults, SmallCallsAreRefusedAsOthersAre) {
  enum class Cause { kHostRefuses, kOtherCall, kBadId };
  const oracle::World roomy = test::make_world(
      {.num_ranks = kNumRanks, .max_tokens = 5, .layout = Layout::kSlab, .spare_slab_rows = kNumRanks * 5});
  const LatencyDispatchSpec spec{.num_blocks = 6, .num_receivers = 3};
  for (const Cause cause : {Cause::kHostRefuses, Cause::kOtherCall, Cause::kBadId}) {
    const LatencyRouting refused_routing(ranks_, roomy, 5);
    const LatencyRouting routing(ranks_, roomy, 5);
    LatencyDispatch refused(ranks_, refused_routing, spec);
    LatencyDispatch good(ranks_, routing, spec);
    if (cause == Cause::kBadId) refused.spoil_id(1, 7, 1000);
    for (int rank = 0; rank < kNumRanks; ++rank) {
      ranks_.report(rank) = {};
      ASSERT_TRUE(refused.is_small(rank));
      if (rank == 1 && cause == Cause::kHostRefuses) {
        refused.refuse(rank);
      } else if (rank == 1 && cause == Cause::kOtherCall) {
        refused.send_other(rank, 5);
        refused.receive_other(rank, 5);
      } else {
        refused.run_whole(rank);
      }
      good.run_whole(rank);
    }
    ASSERT_EQ(ranks_.machine().run(), "");
    expect_fault(cause == Cause::kBadId ? Fault::kBadId : Fault::kDisagreement, refused, good,
                 cause == Cause::kHostRefuses ? 1 : -1);
    for (int rank = 0; rank < kNumRanks; ++rank) {
      if (cause == Cause::kHostRefuses && rank == 1) continue;
      EXPECT_EQ(refused_routing.tables(rank).summary->valid, 0U);
      if (cause == Cause::kBadId) {
        EXPECT_EQ(ranks_.report(rank).fault.value, 1000);
      }
    }
  }
}

TEST_F(EmulatedLatencyFaults, ALostRankIsReportedBySmallCalls) {
  const oracle::World roomy = test::make_world(
      {.num_ranks = kNumRanks, .max_tokens = 5, .layout = Layout::kSlab, .spare_slab_rows = kNumRanks * 5});
  const LatencyRouting routing(ranks_, roomy, 5);
  LatencyDispatch call(ranks_, routing, {.num_blocks = 6, .num_receivers = 3});
  for (const int rank : {0, 2}) {
    ASSERT_TRUE(call.is_small(rank));
    call.run_whole(rank);
  }
  ASSERT_EQ(ranks_.machine().run(), "");
  for (const int rank : {0, 2}) {
    EXPECT_EQ(ranks_.report(rank).lost.state, 1U);
    EXPECT_EQ(ranks_.report(rank).lost.peer, 1);
    EXPECT_TRUE(call.is_untouched(rank));
  }
}

TEST_F(EmulatedLatencyFaults, AFullSlabIsSeenByAll) {
  oracle::World full = world();
  LatencyDispatch good(ranks_, routing_, {});
  const std::int64_t capacity = full.options.slab_capacity;
  LatencyDispatch refused(ranks_, refused_routing_, {});
  refused.set_capacity(capacity - 1);
  for (int rank = 0; rank < kNumRanks; ++rank) {
    refused.run(rank);
  }
  run_to(good);
  expect_fault(Fault::kSlabCapacity, refused, good);
  for (int rank = 0; rank < kNumRanks; ++rank) {
    EXPECT_EQ(ranks_.report(rank).fault.value, capacity);
    EXPECT_EQ(ranks_.report(rank).fault.limit, capacity - 1);
    EXPECT_EQ(ranks_.report(rank).fault.latency, 1);
  }
}

TEST_F(EmulatedLatencyFaults, AReceiveWithoutItsSendIsReported) {
  *routing_.tables(0).dispatch = {};
  LatencyDispatch call(ranks_, routing_, {});
  call.receive(0);
  ASSERT_EQ(ranks_.machine().run(), "");
  EXPECT_EQ(ranks_.report(0).lost.state, 0U);
  ASSERT_EQ(ranks_.report(0).fault.state, 1U);
  EXPECT_EQ(ranks_.report(0).fault.fault, static_cast<std::int32_t>(Fault::kNotRouted));
}

TEST_F(EmulatedLatencyFaults, ALostRankIsReportedByTheReceiveHalf) {
  LatencyDispatch call(ranks_, routing_, {});
  for (int rank = 0; rank < kNumRanks; ++rank) {
    if (rank == 2) continue;  // never arrives
    call.run(rank);
  }
  ASSERT_EQ(ranks_.machine().run(), "");
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(ranks_.report(rank).lost.state, 1U);
    EXPECT_EQ(ranks_.report(rank).lost.peer, 2);
    EXPECT_TRUE(call.is_untouched(rank));
  }
}

/// Rank 2 has sent as many calls as may be in flight and receives none, so it has no room for another one.
TEST_F(EmulatedLatencyFaults, ARankThatReceivesNothingIsReportedByTheSendHalf) {
  constexpr std::size_t kCalls = kMaxLatencyCallsInFlight + 2;
  std::vector<std::unique_ptr<LatencyRouting>> routings;
  std::vector<std::unique_ptr<LatencyDispatch>> calls;
  for (std::size_t call = 0; call < kCalls; ++call) {
    routings.push_back(std::make_unique<LatencyRouting>(ranks_, world(), 5));
    calls.push_back(std::make_unique<LatencyDispatch>(ranks_, *routings.back(), LatencyDispatchSpec{}));
  }
  for (int rank = 0; rank < kNumRanks; ++rank) {
    for (std::size_t call = 0; call < kMaxLatencyCallsInFlight; ++call) calls[call]->send(rank);
    if (rank == 2) continue;
    for (std::size_t call = 0; call < kMaxLatencyCallsInFlight; ++call) calls[call]->receive(rank);
    for (std::size_t call = kMaxLatencyCallsInFlight; call < kCalls; ++call) calls[call]->send(rank);
  }
  ASSERT_EQ(ranks_.machine().run(), "");
  for (int rank = 0; rank < 2; ++rank) {
    for (std::size_t call = 0; call < kMaxLatencyCallsInFlight; ++call) EXPECT_EQ(calls[call]->compare(rank), "");
    EXPECT_EQ(ranks_.report(rank).lost.state, 1U);
    EXPECT_EQ(ranks_.report(rank).lost.peer, 2);
    EXPECT_EQ(ranks_.report(rank).lost.awaited, static_cast<std::int32_t>(cuda::Awaited::kDone));
    EXPECT_EQ(ranks_.report(rank).lost.epoch, kCalls) << "the one without room";
  }
  EXPECT_EQ(ranks_.report(2).lost.state, 0U);
}

TEST_F(EmulatedLatencyFaults, KernelsBehindTheOneInWhichTheGroupBrokeSendNothing) {
  LatencyRouting routing(ranks_, world(), 5);
  LatencyDispatch broken(ranks_, routing, {.agreement = 77});
  LatencyRouting next_routing(ranks_, world(), 5);
  LatencyDispatch next(ranks_, next_routing, {.agreement = 78});
  broken.run_whole(0);
  next.run_whole(0);
  ASSERT_EQ(ranks_.machine().run(), "");
  EXPECT_EQ(ranks_.report(0).lost.state, 1U);
  // The peers must still find this call's data for the call in which it broke, if they reach that call.
  const cuda::LatencyLayout& layout = ranks_.layout();
  for (int rank = 1; rank < kNumRanks; ++rank) {
    const cuda::LatencyWindow window = cuda::LatencyWindow::at(ranks_.params(0).peer_bases[rank], layout);
    EXPECT_EQ(*window.words(layout.control.headers) & 0xFFFFFFFFU, 77U) << "in the first set, from rank 0";
  }
}

}  // namespace
}  // namespace ferry::emulator
