#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <string_view>

#include "conformance/latency_conformance.hpp"

/// Combines of latency mode whose ranks' sums travel as FP8: every byte equals the oracle's.

namespace ferry::test {
namespace {

constexpr std::array<std::int64_t, 5> kHiddens = {128, 640, 1152, 2560, 7168};
/// GPUs have kernels of their own for up to 8, up to 32 and more tokens.
constexpr std::array<std::int64_t, 5> kMaxTokens = {1, 8, 20, 41, 70};
/// max_tokens beyond the most of any rank.
constexpr std::array<std::int64_t, 4> kSpareTokens = {0, 3, 0, kManyTokens};
constexpr std::array<MemoryKind, 3> kMemories = {MemoryKind::kSymmetric, MemoryKind::kPlain, MemoryKind::kMixed};

CombineSpec fp8_sums(std::int64_t hidden, Values values = Values::kBlocks, bool own_weights = false) {
  return {.hidden = hidden,
          .weighted = true,
          .order = CombineOrder::kRankSums,
          .own_weights = own_weights,
          .values = values,
          .wire_format = WireFormat::kFp8};
}

class LatencyFp8Sums : public LatencyConformance {
 protected:
  /// A small case whose sums have H channels, weighted by the dispatch and by themselves.
  static ExchangeCase fp8_case(int num_ranks, std::int64_t hidden, Values values = Values::kBlocks) {
    ExchangeCase one = small_latency_case(num_ranks, static_cast<std::uint64_t>(hidden + num_ranks));
    one.name = fmt::format("{} channels of {} ranks", hidden, num_ranks);
    one.world.num_topk = 5;
    one.combines = {fp8_sums(hidden, values), fp8_sums(hidden, values, true)};
    return one;
  }
};

TEST_P(LatencyFp8Sums, RowsOfEveryLengthAndAnyNumberOfTokens) {
  for (const int num_ranks : {1, 2, 3, 8}) {
    std::vector<ExchangeCase> cases;
    for (std::size_t row = 0; row < kHiddens.size(); ++row) {
      for (std::size_t count = 0; count < kMaxTokens.size(); ++count) {
        // Long rows of many tokens take long on many ranks, and show nothing that they do not show on few.
        if (kHiddens[row] * kMaxTokens[count] * num_ranks > 300'000) continue;
        ExchangeCase one = fp8_case(num_ranks, kHiddens[row]);
        one.name += fmt::format(", at most {} tokens", kMaxTokens[count]);
        one.world.max_tokens = kMaxTokens[count];
        one.memory = kMemories[(row + count) % kMemories.size()];
        one.slab_view = one.memory != MemoryKind::kPlain;
        one.gap_granules = one.memory == MemoryKind::kMixed ? 1 : 0;
        one.spare_max_tokens = kSpareTokens[(row + count) % kSpareTokens.size()];
        if (count % 2 == 1) one.world.counts = TokenCounts::kEven;
        cases.push_back(one);
      }
    }
    run_latency_cases(num_ranks, cases);
  }
}

/// Tokens without an expert, ranks without a token, all rows of a token on one rank, an expert that is named twice.
TEST_P(LatencyFp8Sums, UnevenRoutings) {
  for (const int num_ranks : {2, 4}) {
    std::vector<ExchangeCase> cases;
    for (int pattern = 0; pattern <= static_cast<int>(RoutingPattern::kDuplicates); ++pattern) {
      for (const TokenCounts counts : {TokenCounts::kSomeZero, TokenCounts::kUneven, TokenCounts::kAllZero}) {
        ExchangeCase one = fp8_case(num_ranks, 384, Values::kRandom);
        one.name = fmt::format("pattern {} counts {}", pattern, static_cast<int>(counts));
        one.world.pattern = static_cast<RoutingPattern>(pattern);
        one.world.counts = counts;
        one.world.max_tokens = 10;
        one.world.idle_tail = cases.size() % 2 == 0;
        one.world.custom_placement = cases.size() % 2 == 1;
        cases.push_back(one);
      }
    }
    run_latency_cases(num_ranks, cases);
  }
}

TEST_P(LatencyFp8Sums, NansAndInfinities) {
  for (const std::int64_t spare_max_tokens : {std::int64_t{0}, kManyTokens}) {
    ExchangeCase one = fp8_case(4, 256);
    one.combines.push_back(fp8_sums(256, Values::kSpecial));
    one.world.num_topk = 2;
    one.world.max_tokens = 30;
    one.spare_max_tokens = spare_max_tokens;
    run_latency_cases(4, {one});
  }
}

TEST_P(LatencyFp8Sums, AsManyEntriesAsATokenCanHave) {
  for (const RoutingPattern pattern : {RoutingPattern::kRandom, RoutingPattern::kDuplicates}) {
    ExchangeCase one = fp8_case(4, 1152);
    one.world.num_topk = kMaxTopk;
    one.world.num_experts = 40;
    one.world.pattern = pattern;
    run_latency_cases(4, {one});
  }
}

/// Calls in all formats and orders on one Routing, whole and split.
TEST_P(LatencyFp8Sums, InTurnWithSumsAsGiven) {
  ExchangeCase one = fp8_case(4, 640);
  one.world.max_tokens = 9;
  one.combines = {
      fp8_sums(640),
      {.hidden = 640, .weighted = true, .order = CombineOrder::kRankSums},
      fp8_sums(1152),
      {.hidden = 1152, .weighted = true},
      fp8_sums(128),
      {.dtype = DType::kFloat32, .hidden = 96, .weighted = true, .order = CombineOrder::kRankSums, .own_weights = true},
      fp8_sums(640, Values::kRandom, true),
      fp8_sums(1152)};
  const PreparedCase prepared = prepare_latency(one);
  run_with_group(4, [&](RankContext& context, Group& group) {
    check_latency_case(context, group, prepared, Halves::kTogether);
    check_latency_case(context, group, prepared, Halves::kSplit);
    // Two in flight in different formats, received in another order by each second rank.
    LatencyExchange a(context, group, prepared);
    LatencyExchange b(context, group, prepared);
    if (!a.dispatch() || !b.dispatch() || !a.send_combine(0) || !b.send_combine(1)) return;
    const bool swaps = context.rank() % 2 == 1;
    if ((swaps ? b : a).receive()) (swaps ? a : b).receive();
  });
}

struct Refusal {
  std::size_t combine_idx;
  ErrorCode code;
  std::string_view words;
  std::function<void(LatencyCombineOptions&)> spoil;  ///< on rank 1
};

TEST_P(LatencyFp8Sums, MistakesAreRefusedOnEveryRank) {
  constexpr int kNumRanks = 3;
  using Options = LatencyCombineOptions;
  const auto ask = [](Options& options) { options.wire_format = WireFormat::kFp8; };
  const std::vector<Refusal> refusals = {
      {0, ErrorCode::kInvalidArgument, "rank 1: latency_combine: wire_format is 7, expected kAsGiven or kFp8",
       [](Options& options) { options.wire_format = WireFormat{7}; }},
      {0, ErrorCode::kInvalidArgument,
       "latency_combine: ranks disagree on wire_format: rank 0 has kFp8, rank 1 has kAsGiven",
       [](Options& options) { options.wire_format = WireFormat::kAsGiven; }},
      {0, ErrorCode::kUnsupported,
       "rank 1: latency_combine: wire_format is kFp8 and order is kExact, expected kRankSums",
       [](Options& options) { options.order = CombineOrder::kExact; }},
      {1, ErrorCode::kInvalidArgument, "expected an H that is a multiple of 128", ask},
      {2, ErrorCode::kUnsupported,
       "rank 1: latency_combine: wire_format is kFp8 and the dtype of input x is f32, expected bf16", ask},
  };
  ExchangeCase spec = small_latency_case(kNumRanks);
  spec.combines = {fp8_sums(256),
                   {.hidden = 192, .weighted = true, .order = CombineOrder::kRankSums},
                   {.dtype = DType::kFloat32, .hidden = 128, .weighted = true, .order = CombineOrder::kRankSums}};
  const PreparedCase good = prepare_latency(spec);
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    LatencyExchange exchange(context, group, good);
    if (!exchange.dispatch()) return;
    for (const bool split : {false, true}) {
      for (const Refusal& refusal : refusals) {
        LatencyCombineTensors tensors(context, group, good, refusal.combine_idx);
        tensors.options.split = split;
        if (context.rank() == 1) refusal.spoil(tensors.options);
        const std::string what(refusal.words);
        expect_same_refusal(context, call_combine(group, exchange.routing(), tensors), refusal.code, what,
                            refusal.words);
        tensors.expect_untouched(context, what + ": ");
      }
      for (std::size_t idx = 0; idx < good.combines.size(); ++idx) {
        if (!exchange.combine(idx)) return;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, LatencyFp8Sums, ::testing::ValuesIn(configs_that_verify(false)), config_name);

using LatencyFp8SumsRefused = LatencyFp8Sums;

TEST_P(LatencyFp8SumsRefused, WhereRowsAreVerified) {
  ExchangeCase spec = small_latency_case(4);
  spec.combines = {{.hidden = 128, .weighted = true, .order = CombineOrder::kRankSums}};
  const PreparedCase prepared = prepare_latency(spec);
  run_with_group(4, [&](RankContext& context, Group& group) {
    LatencyExchange exchange(context, group, prepared);
    if (!exchange.dispatch()) return;
    LatencyCombineTensors tensors(context, group, prepared, 0);
    tensors.options.wire_format = WireFormat::kFp8;
    expect_same_refusal(context, call_combine(group, exchange.routing(), tensors), ErrorCode::kUnsupported, "verified",
                        "rank 0: latency_combine: wire_format is kFp8 in a group with GroupOptions::verify");
    tensors.expect_untouched(context, "verified: ");
    exchange.combine(0);
  });
}

// GPU groups that verify have no latency mode.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LatencyFp8SumsRefused);
INSTANTIATE_TEST_SUITE_P(Backends, LatencyFp8SumsRefused, ::testing::ValuesIn(configs_that_verify(true)), config_name);

}  // namespace
}  // namespace ferry::test
