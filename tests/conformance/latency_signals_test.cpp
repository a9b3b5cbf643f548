#include <fmt/format.h>

#include <array>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "conformance/latency_conformance.hpp"
#include "support/late_tiles.hpp"

/// Combines of latency mode whose rows become final, tile by tile, before or while the call runs: every byte equals the
/// oracle's.

namespace ferry::test {
namespace {

/// GPUs have kernels of their own for up to 8, up to 32 and up to 64 tokens.
constexpr std::array<std::int64_t, 5> kMaxTokens = {1, 8, 20, 41, 70};
/// kAllRows: all rows of an expert are one tile.
constexpr std::int64_t kAllRows = 0;
constexpr std::array<std::int64_t, 3> kTileRows = {1, 3, kAllRows};
constexpr std::array<MemoryKind, 3> kMemories = {MemoryKind::kSymmetric, MemoryKind::kPlain, MemoryKind::kMixed};

enum class Finish { kBefore, kLate };

/// Tiles of a test's calls.
struct Tiling {
  std::int64_t tile_rows = 1;
  std::int32_t threshold = 1;
  Finish finish = Finish::kLate;
};

std::int64_t rows_of_tile(const Tiling& tiling, const PreparedCase& prepared) {
  return tiling.tile_rows == kAllRows ? prepared.world.options.slab_capacity : tiling.tile_rows;
}

class LatencySignals : public LatencyConformance {
 protected:
  /// A case with combines of all kinds.
  static ExchangeCase signals_case(int num_ranks, std::uint64_t seed = 1) {
    ExchangeCase one = small_latency_case(num_ranks, seed);
    one.world.counts = TokenCounts::kEven;
    one.combines = {
        {.weighted = true},
        {.weighted = true, .order = CombineOrder::kRankSums},
        {.hidden = 256, .weighted = true, .order = CombineOrder::kRankSums, .wire_format = WireFormat::kFp8},
        {.dtype = DType::kFloat32,
         .hidden = 48,
         .weighted = true,
         .order = CombineOrder::kRankSums,
         .own_weights = true}};
    return one;
  }

  /// Makes a combine of the case on `exchange` with signals, whole or in halves. Returns false after an error.
  static bool combine(RankContext& context, Group& group, const LatencyExchange& exchange, std::size_t idx, bool split,
                      const Tiling& tiling) {
    const PreparedCase& prepared = exchange.prepared();
    LatencyCombineTensors tensors(context, group, prepared, idx);
    tensors.options.split = split;
    LateTiles tiles(group, prepared, context.rank(), tensors.in.x, rows_of_tile(tiling, prepared), tiling.threshold);
    tensors.in.signals = tiles.signals();
    std::thread late;
    if (tiling.finish == Finish::kLate) {
      late = tiles.finish_late();
    } else {
      tiles.finish_all();
    }
    const Status status = call_combine(group, exchange.routing(), tensors);
    if (late.joinable()) late.join();
    const std::string where =
        fmt::format("{}: combine {}, {}, tiles of {} rows finished {}: ", prepared.spec.name, idx,
                    split ? "split" : "whole", tiling.tile_rows, tiling.finish == Finish::kLate ? "late" : "before");
    if (!context.expect_ok(status, where)) return false;
    tensors.expect_received(context, where);
    return true;
  }

  /// Makes all combines of a case, each whole and in halves.
  static void check_case(RankContext& context, Group& group, const PreparedCase& prepared, const Tiling& tiling) {
    LatencyExchange exchange(context, group, prepared);
    if (!exchange.dispatch()) return;
    for (std::size_t idx = 0; idx < prepared.combines.size(); ++idx) {
      for (const bool split : {false, true}) {
        if (!combine(context, group, exchange, idx, split, tiling)) return;
      }
    }
  }
};

TEST_P(LatencySignals, TilesOfAnySizeAndAnyNumberOfTokens) {
  for (const int num_ranks : {1, 2, 4}) {
    std::vector<ExchangeCase> specs;
    std::vector<Tiling> tilings;
    for (std::size_t count = 0; count < kMaxTokens.size(); ++count) {
      for (std::size_t tile = 0; tile < kTileRows.size(); ++tile) {
        ExchangeCase one = signals_case(num_ranks, count + 7 * tile);
        one.name = fmt::format("{} ranks, at most {} tokens", num_ranks, kMaxTokens[count]);
        one.world.max_tokens = kMaxTokens[count];
        one.memory = kMemories[(count + tile) % kMemories.size()];
        one.slab_view = one.memory != MemoryKind::kPlain;
        one.gap_granules = one.memory == MemoryKind::kMixed ? 1 : 0;
        if (count % 2 == 1) one.world.counts = TokenCounts::kUneven;
        specs.push_back(one);
        const Finish finish = (count + tile) % 2 == 0 ? Finish::kLate : Finish::kBefore;
        tilings.push_back({kTileRows[tile], static_cast<std::int32_t>(1 + 3 * tile), finish});
      }
    }
    const std::vector<PreparedCase> cases = prepare_latency(specs);
    run_with_group(num_ranks, [&](RankContext& context, Group& group) {
      for (std::size_t i = 0; i < cases.size(); ++i) check_case(context, group, cases[i], tilings[i]);
    });
  }
}

/// Ranks without a token, ranks without an expert, all rows on one rank.
TEST_P(LatencySignals, UnevenRoutings) {
  constexpr int kNumRanks = 4;
  std::vector<ExchangeCase> specs;
  for (int pattern = 0; pattern <= static_cast<int>(RoutingPattern::kDuplicates); ++pattern) {
    for (const TokenCounts counts : {TokenCounts::kSomeZero, TokenCounts::kAllZero}) {
      ExchangeCase one = signals_case(kNumRanks, static_cast<std::uint64_t>(pattern));
      one.name = fmt::format("pattern {} counts {}", pattern, static_cast<int>(counts));
      one.world.pattern = static_cast<RoutingPattern>(pattern);
      one.world.counts = counts;
      one.world.custom_placement = specs.size() % 2 == 0;
      specs.push_back(one);
    }
  }
  const std::vector<PreparedCase> cases = prepare_latency(specs);
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    for (const PreparedCase& one : cases) check_case(context, group, one, {.tile_rows = 2, .threshold = 5});
  });
}

/// Signals are no part of the ranks' agreement.
TEST_P(LatencySignals, OnSomeRanksOnly) {
  constexpr int kNumRanks = 4;
  const PreparedCase prepared = prepare_latency(signals_case(kNumRanks));
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    LatencyExchange exchange(context, group, prepared);
    if (!exchange.dispatch()) return;
    for (std::size_t idx = 0; idx < prepared.combines.size(); ++idx) {
      for (const int odd : {0, 1}) {
        if (context.rank() % 2 != odd) {
          if (!exchange.combine(idx)) return;
        } else if (!combine(context, group, exchange, idx, false, {.tile_rows = 3, .threshold = 2})) {
          return;
        }
      }
    }
  });
}

/// A split combine is sent before its rows are computed, and another rank's tiles are late.
TEST_P(LatencySignals, TilesThatFinishAfterTheSendHalf) {
  constexpr int kNumRanks = 2;
  const PreparedCase prepared = prepare_latency(signals_case(kNumRanks));
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    LatencyExchange exchange(context, group, prepared);
    if (!exchange.dispatch()) return;
    for (std::size_t idx = 0; idx < prepared.combines.size(); ++idx) {
      LatencyCombineTensors tensors(context, group, prepared, idx);
      tensors.options.split = true;
      LateTiles tiles(group, prepared, context.rank(), tensors.in.x, 2, 4);
      tensors.in.signals = tiles.signals();
      const Status sent =
          group.latency_combine(exchange.routing(), tensors.in, tensors.out, stream_of(group), tensors.options);
      if (!context.expect_ok(sent, "send half")) return;
      // On GPUs this thread's copies follow the combine on its stream.
      std::thread late = tiles.finish_late();
      const Status received = finish(group, group.latency_receive(exchange.routing(), stream_of(group)));
      late.join();
      if (!context.expect_ok(received, "receive half")) return;
      tensors.expect_received(context, fmt::format("combine {}: ", idx));
    }
  });
}

TEST_P(LatencySignals, ATileThatNeverFinishes) {
  constexpr int kNumRanks = 2;
  constexpr int kCulprit = 1;
  constexpr std::int64_t kTimeoutNs = 3 * kNsPerSecond;
  const PreparedCase prepared = prepare_latency(signals_case(kNumRanks));
  for (const bool split : {false, true}) {
    run_on_ranks(kNumRanks, [&](RankContext& context) {
      GroupOptions options = group_options(context);
      options.timeout_ns = kTimeoutNs;
      auto group = Group::create(context.bootstrap(), options);
      if (!context.expect_ok(group.status(), "Group::create")) return;
      LatencyExchange exchange(context, **group, prepared);
      if (!exchange.dispatch()) return;
      LatencyCombineTensors tensors(context, **group, prepared, 1);
      tensors.options.split = split;
      LateTiles tiles(**group, prepared, context.rank(), tensors.in.x, 2, 4);
      tensors.in.signals = tiles.signals();
      tiles.finish_all();
      if (!context.expect(!tiles.tiles().empty(), "a rank without rows")) return;
      // None finishes: a rank whose tokens have no row in such a tile gets its sums on GPUs.
      if (context.rank() == kCulprit) {
        for (const LateTiles::Tile& tile : tiles.tiles()) tiles.almost_finish(tile);
      }
      const Status status = call_combine(**group, exchange.routing(), tensors);
      context.expect_code(status, ErrorCode::kTimeout, "a tile that never finishes");
      context.expect(status.peer() == kCulprit, fmt::format("the error names rank {}", status.peer()));
      if (context.rank() == kCulprit) {
        const std::string text = status.to_string();
        for (const std::string_view words : {"tile ", " of local expert ", "is 3, expected at least 4"}) {
          context.expect(text.find(words) != std::string::npos, fmt::format("expected \"{}\" in \"{}\"", words, text));
        }
      }
      context.expect_ok(context.bootstrap()->all_gather({}, 10 * kTimeoutNs).status(), "meet after the error");
    });
  }
}

struct Refusal {
  std::string_view words;
  std::function<void(LatencyCombineTensors&)> spoil;  ///< on rank 1
};

TEST_P(LatencySignals, MistakesAreRefusedOnEveryRank) {
  constexpr int kNumRanks = 3;
  using Tensors = LatencyCombineTensors;
  const std::vector<Refusal> refusals = {
      {"signals.tile_rows is 0, expected", [](Tensors& t) { t.in.signals.tile_rows = 0; }},
      {"signals.tile_rows is -2, expected", [](Tensors& t) { t.in.signals.tile_rows = -2; }},
      {"signals.threshold is 0, expected", [](Tensors& t) { t.in.signals.threshold = 0; }},
      {"signals.threshold is -1, expected", [](Tensors& t) { t.in.signals.threshold = -1; }},
      {"has dtype f32, expected i32", [](Tensors& t) { t.in.signals.words.dtype = DType::kFloat32; }},
      {"has dtype i64, expected i32", [](Tensors& t) { t.in.signals.words.dtype = DType::kInt64; }},
      {"(a word for each 4 of an expert's", [](Tensors& t) { t.in.signals.tile_rows = 4; }},
      {"(a word for each 2 of an expert's", [](Tensors& t) { t.in.signals.words.shape[0] += 1; }},
      {"(a word for each 2 of an expert's", [](Tensors& t) { t.in.signals.words.shape[1] -= 1; }},
      {"(a word for each 2 of an expert's", [](Tensors& t) { t.in.signals.words.num_dims = 1; }},
      {"expected 1: it must be contiguous", [](Tensors& t) { t.in.signals.words.strides[1] = 2; }},
      {"is a null pointer, expected memory of", [](Tensors& t) { t.in.signals.words.data = nullptr; }},
      {"shares memory with signals.words", [](Tensors& t) { t.in.signals.words.data = t.out.x.data; }},
  };
  ExchangeCase spec = signals_case(kNumRanks);
  spec.world.num_experts = 2 * kNumRanks;
  const PreparedCase good = prepare_latency(spec);
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    LatencyExchange exchange(context, group, good);
    if (!exchange.dispatch()) return;
    for (const bool split : {false, true}) {
      for (const Refusal& refusal : refusals) {
        LatencyCombineTensors tensors(context, group, good, 0);
        tensors.options.split = split;
        LateTiles tiles(group, good, context.rank(), tensors.in.x, 2, 4);
        tensors.in.signals = tiles.signals();
        tiles.finish_all();
        if (context.rank() == 1) refusal.spoil(tensors);
        const std::string what(refusal.words);
        expect_same_refusal(context, call_combine(group, exchange.routing(), tensors), ErrorCode::kInvalidArgument,
                            what, refusal.words);
        tensors.expect_untouched(context, what + ": ");
      }
      if (!combine(context, group, exchange, 0, split, {.tile_rows = 2, .threshold = 4})) return;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, LatencySignals, ::testing::ValuesIn(configs_that_verify(false)), config_name);

class LatencySignalsRefused : public LatencySignals {
 protected:
  /// Expects that a combine with signals is refused for an option of its group.
  static void expect_refused(RankContext& context, Group& group, const PreparedCase& prepared,
                             std::string_view option) {
    LatencyExchange exchange(context, group, prepared);
    if (!exchange.dispatch()) return;
    LatencyCombineTensors tensors(context, group, prepared, 0);
    LateTiles tiles(group, prepared, context.rank(), tensors.in.x, 1, 1);
    tensors.in.signals = tiles.signals();
    const auto words_of = [option](int rank) {
      return fmt::format(
          "rank {}: latency_combine: signals are given in a group with GroupOptions::{}, expected one "
          "without",
          rank, option);
    };
    expect_own_refusals(context, group, call_combine(group, exchange.routing(), tensors),
                        {ErrorCode::kUnsupported, std::string(option), words_of});
    tensors.expect_untouched(context, "refused: ");
    exchange.combine(0);
  }
};

TEST_P(LatencySignalsRefused, WhereRowsAreVerified) {
  if (!GetParam().verify) return;
  const PreparedCase prepared = prepare_latency(small_latency_case(4));
  run_with_group(4, [&](RankContext& context, Group& group) { expect_refused(context, group, prepared, "verify"); });
}

TEST_P(LatencySignalsRefused, WhereRanksAreMasked) {
  if (GetParam().verify || GetParam().several_nodes) return;
  const PreparedCase prepared = prepare_latency(small_latency_case(4));
  run_on_ranks(4, [&](RankContext& context) {
    GroupOptions options = group_options(context);
    options.mask_lost_ranks = true;
    auto group = Group::create(context.bootstrap(), options);
    if (!context.expect_ok(group.status(), "Group::create")) return;
    expect_refused(context, **group, prepared, "mask_lost_ranks");
    context.expect_ok((*group)->destroy(), "destroy");
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, LatencySignalsRefused, ::testing::ValuesIn(backend_configs()), config_name);

}  // namespace
}  // namespace ferry::test
