/// Emulated GPUs must continue without lost ranks, whenever these are lost, with the oracle's results for the remaining
/// ranks.

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "emulator/latency_combine.hpp"
#include "emulator/latency_dispatch.hpp"

namespace ferry::emulator {
namespace {

using cuda::LatencyKind;

constexpr std::int64_t kLatencyBytes = std::int64_t{24} << 20;
constexpr int kNumRanks = 4;
constexpr int kVictim = 2;
/// Several steps of the machine's clock, between which ranks can show that they are waiting.
constexpr std::uint64_t kMaskTimeoutNs = 2 * LatencyRanks::kTimeoutNs;

std::vector<int> all_but(int rank) {
  std::vector<int> others;
  for (int other = 0; other < kNumRanks; ++other) {
    if (other != rank) others.push_back(other);
  }
  return others;
}

struct Layer {
  Layer(LatencyRanks& ranks, std::mt19937_64& random, const std::vector<int>& masked,
        const std::vector<int>& combine_masked = {})
      : Layer(ranks, draw_world(random), draw_dispatch(random), draw_combine(random, combine_masked), masked) {}
  Layer(LatencyRanks& ranks, const test::WorldSpec& world, const LatencyDispatchSpec& dispatched,
        const LatencyCombineSpec& combined, const std::vector<int>& masked)
      : routing(ranks, test::make_world(world), world.max_tokens, {}, masked),
        dispatch(ranks, routing, dispatched),
        combine(ranks, routing, combined) {
    routing.mask_later(combined.masked);
  }

  static test::WorldSpec draw_world(std::mt19937_64& random) {
    return {.num_ranks = kNumRanks,
            .num_topk = 1 + static_cast<int>(random() % 8),
            .num_experts = 11,
            .max_tokens = 1 + static_cast<std::int64_t>(random() % 6),
            .pattern = random() % 2 == 0 ? test::RoutingPattern::kDuplicates : test::RoutingPattern::kRandom,
            .counts = random() % 2 == 0 ? test::TokenCounts::kUneven : test::TokenCounts::kEven,
            .layout = Layout::kSlab,
            .custom_placement = random() % 2 == 0,
            .seed = random()};
  }
  static LatencyDispatchSpec draw_dispatch(std::mt19937_64& random) {
    return {.quantize = random() % 2 == 0 ? Quantization::kFp8 : Quantization::kNone,
            .zero_padding = random() % 2 == 0,
            .num_blocks = 2 + static_cast<int>(random() % 5),
            .warps_per_row = 1 << random() % 3,
            .seed = random()};
  }
  static LatencyCombineSpec draw_combine(std::mt19937_64& random, const std::vector<int>& masked) {
    return {.hidden = 264,
            .order = random() % 2 == 0 ? CombineOrder::kExact : CombineOrder::kRankSums,
            .own_weights = random() % 2 == 0,
            .num_blocks = 2 + static_cast<int>(random() % 3),
            .seed = random(),
            .masked = masked};
  }

  void call(int rank) {
    dispatch.send(rank);
    dispatch.receive(rank);
    combine.send(rank);
    combine.receive(rank);
  }
  void expect_right(int rank) const {
    EXPECT_EQ(dispatch.compare(rank), "") << "rank " << rank;
    EXPECT_EQ(combine.compare(rank), "") << "rank " << rank;
  }

  LatencyRouting routing;
  LatencyDispatch dispatch;
  LatencyCombine combine;
};

class EmulatedLatencyMask : public testing::Test {
 protected:
  std::unique_ptr<LatencyRanks> make_ranks(std::uint64_t mask_timeout_ns = kMaskTimeoutNs) {
    return std::make_unique<LatencyRanks>(LatencyRanks::Options{
        .num_ranks = kNumRanks, .latency_bytes = kLatencyBytes, .seed = random_(), .mask_timeout_ns = mask_timeout_ns});
  }
  std::unique_ptr<Layer> make_layer(LatencyRanks& ranks, const std::vector<int>& masked,
                                    const std::vector<int>& combine_masked = {}) {
    return std::make_unique<Layer>(ranks, random_, masked, combine_masked);
  }
  static void expect_no_report(LatencyRanks& ranks, int rank) {
    EXPECT_EQ(ranks.report(rank).lost.state, 0U) << "rank " << rank;
    EXPECT_EQ(ranks.report(rank).fault.state, 0U) << "rank " << rank;
  }
  static std::vector<std::int32_t> masks_of(LatencyRanks& ranks, int rank) {
    std::vector<std::int32_t> masks(kNumRanks, -1);
    ranks.query_mask(rank, masks.data());
    EXPECT_EQ(ranks.machine().run(), "");
    return masks;
  }
  static std::vector<std::int32_t> mask_of(const std::vector<int>& masked) {
    std::vector<std::int32_t> masks(kNumRanks, 0);
    for (const int rank : masked) masks[static_cast<std::size_t>(rank)] = 1;
    return masks;
  }

  std::mt19937_64 random_{91};
};

TEST_F(EmulatedLatencyMask, ARankThatMakesNoMoreCalls) {
  for (int round = 0; round < 2; ++round) {
    const auto ranks = make_ranks();
    const auto whole = make_layer(*ranks, {});
    std::vector<std::unique_ptr<Layer>> layers;
    for (int i = 0; i < 4; ++i) layers.push_back(make_layer(*ranks, {kVictim}));
    for (int rank = 0; rank < kNumRanks; ++rank) {
      whole->call(rank);
      if (rank == kVictim) continue;
      for (const auto& layer : layers) layer->call(rank);
    }
    ASSERT_EQ(ranks->machine().run(), "") << "round " << round;
    whole->expect_right(kVictim);
    for (const int rank : all_but(kVictim)) {
      expect_no_report(*ranks, rank);
      whole->expect_right(rank);
      for (const auto& layer : layers) layer->expect_right(rank);
      EXPECT_EQ(masks_of(*ranks, rank), mask_of({kVictim}));
    }
  }
}

/// No deadline expires here: the host knows that the rank is lost.
TEST_F(EmulatedLatencyMask, ARankThatTheHostHasSeenDie) {
  const auto ranks = make_ranks(std::uint64_t{1} << 55);
  const auto layer = make_layer(*ranks, {kVictim});
  for (const int rank : all_but(kVictim)) {
    ranks->report(rank).lost_ranks.lost[kVictim] = 1;
    layer->call(rank);
  }
  ASSERT_EQ(ranks->machine().run(), "");
  for (const int rank : all_but(kVictim)) {
    expect_no_report(*ranks, rank);
    layer->expect_right(rank);
  }
}

/// Only the header of the victim's last call arrives.
TEST_F(EmulatedLatencyMask, ARankThatDiesWhileItSends) {
  for (int round = 0; round < 2; ++round) {
    const auto ranks = make_ranks();
    const auto layer = make_layer(*ranks, {kVictim});
    const auto next = make_layer(*ranks, {kVictim});
    for (const int rank : all_but(kVictim)) {
      cuda::LatencyHeader header;
      header.agreement = LatencyDispatchSpec{}.agreement;
      header.num_tokens = 1;
      ranks->put_header(rank, LatencyKind::kDispatch, kVictim, 1, 0, header);
      layer->call(rank);
      next->call(rank);
    }
    ASSERT_EQ(ranks->machine().run(), "");
    for (const int rank : all_but(kVictim)) {
      expect_no_report(*ranks, rank);
      layer->expect_right(rank);
      next->expect_right(rank);
    }
  }
}

TEST_F(EmulatedLatencyMask, ARankThatDoesNotCombine) {
  for (int round = 0; round < 2; ++round) {
    const auto ranks = make_ranks();
    LatencyCombineSpec combine = Layer::draw_combine(random_, {kVictim});
    if (round == 0) {  // the others wait for the victim's weights before they send sums
      combine.order = CombineOrder::kRankSums;
      combine.own_weights = true;
    }
    const auto layer = std::make_unique<Layer>(*ranks, Layer::draw_world(random_), Layer::draw_dispatch(random_),
                                               combine, std::vector<int>{});
    const auto next = make_layer(*ranks, {kVictim});
    layer->dispatch.send(kVictim);
    layer->dispatch.receive(kVictim);
    for (const int rank : all_but(kVictim)) {
      layer->call(rank);
      next->call(rank);
    }
    ASSERT_EQ(ranks->machine().run(), "");
    for (const int rank : all_but(kVictim)) {
      expect_no_report(*ranks, rank);
      layer->expect_right(rank);
      next->expect_right(rank);
      EXPECT_EQ(masks_of(*ranks, rank), mask_of({kVictim}));
    }
  }
}

/// A live victim finds that all ranks mask it, makes the same calls with its own tokens alone, and returns.
TEST_F(EmulatedLatencyMask, ARankMaskedByHandThatComesBack) {
  const auto ranks = make_ranks(std::uint64_t{1} << 55);
  for (int round = 0; round < 2; ++round) {
    for (const int rank : all_but(kVictim)) ranks->update_mask(rank, {kVictim}, true);
    ASSERT_EQ(ranks->machine().run(), "");
    std::vector<std::unique_ptr<Layer>> theirs;
    std::vector<std::unique_ptr<Layer>> alone;
    for (int i = 0; i < 4; ++i) {
      theirs.push_back(make_layer(*ranks, {kVictim}));
      alone.push_back(make_layer(*ranks, all_but(kVictim)));
      for (int rank = 0; rank < kNumRanks; ++rank) (rank == kVictim ? alone : theirs).back()->call(rank);
    }
    ASSERT_EQ(ranks->machine().run(), "") << "round " << round;
    for (int rank = 0; rank < kNumRanks; ++rank) {
      expect_no_report(*ranks, rank);
      for (const auto& layer : rank == kVictim ? alone : theirs) layer->expect_right(rank);
      const std::vector<int> masked = rank == kVictim ? all_but(kVictim) : std::vector<int>{kVictim};
      EXPECT_EQ(masks_of(*ranks, rank), mask_of(masked));
      ranks->update_mask(rank, masked, false);
      EXPECT_EQ(masks_of(*ranks, rank), mask_of({}));
    }
    std::vector<std::unique_ptr<Layer>> whole;
    for (int i = 0; i < 2; ++i) {
      whole.push_back(make_layer(*ranks, {}));
      for (int rank = 0; rank < kNumRanks; ++rank) whole.back()->call(rank);
    }
    ASSERT_EQ(ranks->machine().run(), "") << "round " << round;
    for (int rank = 0; rank < kNumRanks; ++rank) {
      for (const auto& layer : whole) layer->expect_right(rank);
    }
  }
}

/// Two ranks continue without each other if either masks the other. A token's rows are on each rank at the positions
/// that this rank chose.
TEST_F(EmulatedLatencyMask, RanksThatMaskDifferentOnes) {
  for (int round = 0; round < 2; ++round) {
    const auto ranks = make_ranks();
    ranks->update_mask(0, {1}, true);
    ranks->update_mask(2, {3}, true);
    ASSERT_EQ(ranks->machine().run(), "");
    const std::uint64_t seed = random_();
    std::vector<std::unique_ptr<Layer>> layers;
    for (int rank = 0; rank < kNumRanks; ++rank) {
      std::mt19937_64 same(seed);
      layers.push_back(std::make_unique<Layer>(*ranks, same, std::vector<int>{rank ^ 1}));
      layers.back()->call(rank);
    }
    ASSERT_EQ(ranks->machine().run(), "") << "round " << round;
    for (int rank = 0; rank < kNumRanks; ++rank) {
      expect_no_report(*ranks, rank);
      // Returned rows were made by each rank's program from its own slab, so only their arrival is checked.
      EXPECT_EQ(layers[static_cast<std::size_t>(rank)]->dispatch.compare(rank), "") << "round " << round;
      EXPECT_EQ(masks_of(*ranks, rank), mask_of({rank ^ 1}));
    }
  }
}

/// Tokens pick other homes in place of those on a masked rank, if the expert has another home.
TEST_F(EmulatedLatencyMask, TokensPickTheHomesThatAreLeft) {
  for (const ReplicaChoice choice : {ReplicaChoice::kNearest, ReplicaChoice::kRoundRobin}) {
    const auto ranks = make_ranks();
    test::WorldSpec world = Layer::draw_world(random_);
    world.num_topk = 5;
    world.max_tokens = 6;
    world.pattern = test::RoutingPattern::kRandom;
    world.counts = test::TokenCounts::kEven;
    world.num_replicas = 7;
    world.replica_choice = choice;
    world.spare_slab_rows = kNumRanks * world.max_tokens;
    const auto make = [&](const std::vector<int>& masked) {
      return std::make_unique<Layer>(*ranks, world, Layer::draw_dispatch(random_), Layer::draw_combine(random_, {}),
                                     masked);
    };
    const auto whole = make({});
    for (int rank = 0; rank < kNumRanks; ++rank) whole->call(rank);
    ASSERT_EQ(ranks->machine().run(), "");
    for (const int rank : all_but(kVictim)) ranks->update_mask(rank, {kVictim}, true);
    ASSERT_EQ(ranks->machine().run(), "");
    const auto left = make({kVictim});
    EXPECT_NE(left->routing.world().ranks[0].topk_idx, whole->routing.world().ranks[0].topk_idx);
    for (const int rank : all_but(kVictim)) left->call(rank);
    ASSERT_EQ(ranks->machine().run(), "");
    for (const int rank : all_but(kVictim)) {
      expect_no_report(*ranks, rank);
      whole->expect_right(rank);
      left->expect_right(rank);
    }
  }
}

TEST_F(EmulatedLatencyMask, RefusedCallsOfSurvivors) {
  const auto ranks = make_ranks();
  const auto refused = make_layer(*ranks, {kVictim});
  const auto good = make_layer(*ranks, {kVictim});
  for (const int rank : all_but(kVictim)) {
    if (rank == 3) {
      refused->dispatch.refuse(rank);
    } else {
      refused->dispatch.send(rank);
      refused->dispatch.receive(rank);
    }
    good->call(rank);
  }
  ASSERT_EQ(ranks->machine().run(), "");
  for (const int rank : all_but(kVictim)) {
    const cuda::FaultReport& fault = ranks->report(rank).fault;
    EXPECT_EQ(ranks->report(rank).lost.state, 0U);
    good->expect_right(rank);
    if (rank == 3) continue;  // its program already knows
    EXPECT_EQ(fault.fault, static_cast<std::int32_t>(cuda::Fault::kDisagreement));
    EXPECT_EQ(fault.record_numbers[kVictim], cuda::kMaskedRecord);
    EXPECT_EQ(fault.record_numbers[3], 103);
    EXPECT_TRUE(refused->dispatch.is_untouched(rank));
  }
}

/// Words that a masked rank still sends to its granted sets arrive while calls without it use these sets. The masked
/// rank's own memory, which may be freed, must not be used.
TEST_F(EmulatedLatencyMask, LateWordsOfAMaskedRank) {
  const auto ranks = make_ranks();
  std::vector<std::unique_ptr<Layer>> layers;
  for (int i = 0; i < cuda::kSets; ++i) layers.push_back(make_layer(*ranks, {kVictim}));
  for (const int rank : all_but(kVictim)) ranks->update_mask(rank, {kVictim}, true);
  ASSERT_EQ(ranks->machine().run(), "");
  const DeviceMemory& arena = ranks->arena(kVictim);
  const std::vector<std::byte> before(arena.data(), arena.data() + arena.size());
  for (const int rank : all_but(kVictim)) {
    for (int i = 0; i < cuda::kSets; ++i) {
      cuda::LatencyHeader header;
      header.agreement = 1;
      header.num_tokens = 5;
      for (const LatencyKind kind : {LatencyKind::kDispatch, LatencyKind::kCombine}) {
        header.blocks_or_homes = kind == LatencyKind::kCombine ? 3 : 0;
        ranks->put_header(rank, kind, kVictim, static_cast<std::uint64_t>(i + 1), i, header);
      }
      layers[static_cast<std::size_t>(i)]->call(rank);
    }
  }
  ASSERT_EQ(ranks->machine().run(), "");
  for (const int rank : all_but(kVictim)) {
    expect_no_report(*ranks, rank);
    for (const auto& layer : layers) layer->expect_right(rank);
  }
  EXPECT_TRUE(std::equal(before.begin(), before.end(), arena.data()));
}

/// One rank waits, until its deadline, for weights of the victim, which the others mask by hand. The others wait for
/// that rank and see that it is itself waiting.
TEST_F(EmulatedLatencyMask, ARankThatWaitsIsNotMaskedForThat) {
  const auto ranks = make_ranks();
  LatencyCombineSpec combine = Layer::draw_combine(random_, {kVictim});
  combine.order = CombineOrder::kRankSums;
  combine.own_weights = true;
  Layer layer(*ranks, Layer::draw_world(random_), Layer::draw_dispatch(random_), combine, {});
  for (int rank = 0; rank < kNumRanks; ++rank) {
    layer.dispatch.send(rank);
    layer.dispatch.receive(rank);
    if (rank == kVictim) continue;
    if (rank != 0) ranks->update_mask(rank, {kVictim}, true);
    layer.combine.send(rank);
    layer.combine.receive(rank);
  }
  ASSERT_EQ(ranks->machine().run(), "");
  for (const int rank : all_but(kVictim)) {
    expect_no_report(*ranks, rank);
    layer.expect_right(rank);
    EXPECT_EQ(masks_of(*ranks, rank), mask_of({kVictim}));
  }
}

/// A late rank is awaited, not masked.
TEST_F(EmulatedLatencyMask, ARankThatIsLateShowsInTheWaitsOfTheOthers) {
  constexpr int kLate = 1;
  // Two steps of the machine's clock, between which threads read it.
  constexpr std::uint64_t kLateNs = 20'000'000'000;
  const auto ranks = make_ranks();
  const auto layer = make_layer(*ranks, {});
  ranks->delay(kLate, kLateNs);
  for (int rank = 0; rank < kNumRanks; ++rank) layer->call(rank);
  ASSERT_EQ(ranks->machine().run(), "");
  for (int rank = 0; rank < kNumRanks; ++rank) {
    layer->expect_right(rank);
    const std::uint64_t waited_ns = ranks->report(rank).waits.steps_ns[kLate];
    EXPECT_LE(waited_ns, rank == kLate ? 0 : kLateNs) << rank;
    EXPECT_GE(waited_ns, rank == kLate ? 0 : kLateNs / 2) << rank;
  }
}

}  // namespace
}  // namespace ferry::emulator
