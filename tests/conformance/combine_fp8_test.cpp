#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "conformance/backend_config.hpp"
#include "support/exchange_check.hpp"

/// Combines whose rows travel as FP8.

namespace ferry::test {
namespace {

constexpr std::array<Layout, 3> kLayouts = {Layout::kTokens, Layout::kExperts, Layout::kSlab};
constexpr std::array<DType, 2> kDTypes = {DType::kBfloat16, DType::kFloat32};

/// Configurations whose groups take FP8, or those whose groups refuse it.
std::vector<BackendConfig> configs(bool takes_fp8) {
  std::vector<BackendConfig> all = exchange_configs();
  std::erase_if(all, [takes_fp8](const BackendConfig& one) { return takes_fp8 == (one.several_nodes || one.verify); });
  return all;
}

class CombineFp8 : public Conformance {
 protected:
  /// One case for every layout and kind of memory, with rows that hold no token.
  static std::vector<ExchangeCase> every_case(const WorldSpec& world, const std::vector<CombineSpec>& combines) {
    std::vector<ExchangeCase> cases;
    for (const Layout layout : kLayouts) {
      for (const MemoryKind memory : {MemoryKind::kSymmetric, MemoryKind::kPlain, MemoryKind::kMixed}) {
        ExchangeCase one;
        one.name = fmt::format("layout {} memory {}", static_cast<int>(layout), static_cast<int>(memory));
        one.world = world;
        one.world.layout = layout;
        one.world.expert_alignment = 3;
        one.world.spare_slab_rows = 2;
        one.world.spare_recv_rows = memory == MemoryKind::kPlain ? -1 : 4;
        one.world.seed = world.seed + cases.size();
        one.memory = memory;
        one.gap_granules = memory == MemoryKind::kPlain ? 1 : 0;
        one.slab_view = memory == MemoryKind::kPlain;
        one.combines = combines;
        cases.push_back(one);
      }
    }
    return cases;
  }

  /// Weighted and not, with none to two biases.
  static std::vector<CombineSpec> every_combine(std::int64_t hidden, Values values) {
    std::vector<CombineSpec> combines;
    for (const DType dtype : kDTypes) {
      for (const bool weighted : {false, true}) {
        for (const int num_biases : {0, 1, 2}) {
          combines.push_back({.dtype = dtype,
                              .hidden = hidden,
                              .weighted = weighted,
                              .own_weights = num_biases == 2,
                              .num_biases = num_biases,
                              .return_weights = num_biases != 1,
                              .values = values,
                              .wire_format = WireFormat::kFp8});
        }
      }
    }
    return combines;
  }
};

TEST_P(CombineFp8, EveryLayoutMemoryAndDtype) {
  for (const int num_ranks : {1, 2, 3, 5, 8}) {
    WorldSpec world{.num_ranks = num_ranks, .num_topk = 5, .num_experts = 11, .counts = TokenCounts::kUneven};
    world.seed = 70;
    run_cases(num_ranks, every_case(world, every_combine(256, Values::kBlocks)));
  }
}

TEST_P(CombineFp8, SpecialValues) {
  const WorldSpec world{.num_ranks = 4, .num_topk = 3, .num_experts = 8};
  run_cases(4, every_case(world, every_combine(128, Values::kSpecial)));
}

TEST_P(CombineFp8, UnevenRoutings) {
  for (const RoutingPattern pattern :
       {RoutingPattern::kZipf, RoutingPattern::kOneHot, RoutingPattern::kDuplicates, RoutingPattern::kNone}) {
    WorldSpec world{.num_ranks = 3, .num_topk = 4, .num_experts = 9, .pattern = pattern};
    world.counts = TokenCounts::kSomeZero;
    run_cases(3, every_case(world, every_combine(128, Values::kRandom)));
  }
}

/// Rows of one block, of whole and of broken groups of blocks, and longer than what a warp takes at a time.
TEST_P(CombineFp8, RowsOfEveryLength) {
  std::vector<CombineSpec> combines;
  for (const std::int64_t blocks : {1, 2, 3, 4, 5, 9, 17, 31}) {
    combines.push_back({.dtype = blocks % 4 == 1 ? DType::kFloat32 : DType::kBfloat16,
                        .hidden = 128 * blocks,
                        .weighted = blocks % 2 == 0,
                        .num_biases = blocks % 3 == 0 ? 1 : 0,
                        .values = Values::kBlocks,
                        .wire_format = WireFormat::kFp8});
  }
  run_cases(3, every_case({.num_ranks = 3, .num_topk = 6, .num_experts = 12, .max_tokens = 6}, combines));
}

/// Most rows that a token can have, and most entries that share one row.
TEST_P(CombineFp8, AsManyEntriesAsATokenCanHave) {
  std::vector<CombineSpec> combines;
  for (const DType dtype : kDTypes) {
    for (const bool weighted : {false, true}) {
      combines.push_back({.dtype = dtype,
                          .hidden = 640,
                          .weighted = weighted,
                          .num_biases = 2,
                          .values = Values::kBlocks,
                          .wire_format = WireFormat::kFp8});
    }
  }
  for (const RoutingPattern pattern : {RoutingPattern::kRandom, RoutingPattern::kDuplicates}) {
    WorldSpec world{.num_ranks = 3, .num_topk = kMaxTopk, .num_experts = 40, .max_tokens = 4, .pattern = pattern};
    world.seed = 90;
    std::vector<ExchangeCase> cases = every_case(world, combines);
    std::erase_if(cases, [](const ExchangeCase& one) {
      return one.memory == MemoryKind::kMixed || one.world.layout == Layout::kSlab;
    });
    run_cases(3, cases);
    if (on_gpus()) run_cases(3, cases, {.copy_path = CopyPath::kLoadStore});
  }
}

TEST_P(CombineFp8, AModelsRow) {
  std::vector<ExchangeCase> cases;
  for (const MemoryKind memory : {MemoryKind::kSymmetric, MemoryKind::kPlain}) {
    ExchangeCase one;
    one.name = "a model's row";
    one.world = {.num_ranks = 8, .num_topk = 8, .num_experts = 256, .max_tokens = 4};
    one.memory = memory;
    one.combines = every_combine(7168, Values::kBlocks);
    std::erase_if(one.combines, [](const CombineSpec& combine) { return combine.num_biases != 1; });
    cases.push_back(one);
  }
  run_cases(8, cases);
  if (on_gpus()) run_cases(8, cases, {.copy_path = CopyPath::kLoadStore});
}

/// Many calls with one Routing: staging grows, is used for either format, and stays idle.
TEST_P(CombineFp8, BetweenCombinesOfRowsAsGiven) {
  const auto sums = [](std::int64_t hidden, WireFormat wire_format) {
    return CombineSpec{.hidden = hidden, .weighted = hidden == 256, .wire_format = wire_format};
  };
  run_cases(4, every_case({.num_ranks = 4, .num_topk = 4, .num_experts = 16, .max_tokens = 30},
                          {sums(128, WireFormat::kFp8), sums(128, WireFormat::kAsGiven), sums(256, WireFormat::kFp8),
                           sums(512, WireFormat::kAsGiven), sums(128, WireFormat::kFp8), sums(768, WireFormat::kFp8)}));
}

TEST_P(CombineFp8, MistakesAreRefusedOnEveryRank) {
  ExchangeCase spec;
  spec.name = "good case";
  spec.world = {.num_ranks = 3, .num_topk = 2, .num_experts = 6, .max_tokens = 4};
  spec.combines = {{.hidden = 256, .wire_format = WireFormat::kFp8}, {.hidden = 192}};
  const PreparedCase good = prepare(spec);
  struct Mistake {
    std::size_t combine_idx;
    const char* mentions;
    std::function<void(CombineOptions&)> spoil;
  };
  const std::vector<Mistake> mistakes = {
      {0, "wire_format is 7, expected kAsGiven or kFp8",
       [](CombineOptions& options) { options.wire_format = WireFormat{7}; }},
      {0, "ranks disagree on wire_format: rank 0 has kFp8, rank 1 has kAsGiven",
       [](CombineOptions& options) { options.wire_format = WireFormat::kAsGiven; }},
      {1, "expected an H that is a multiple of 128",
       [](CombineOptions& options) { options.wire_format = WireFormat::kFp8; }},
  };
  run_with_group(3, [&](RankContext& context, Group& group) {
    const Routing routing = check_route(context, group, good);
    if (!routing.present()) return;
    for (const Mistake& mistake : mistakes) {
      CombineTensors tensors(context, group, good, mistake.combine_idx);
      if (context.rank() == 1) mistake.spoil(tensors.options);
      const Status status =
          finish(group, group.combine(routing, tensors.in, tensors.out, stream_of(group), tensors.options));
      context.expect_code(status, ErrorCode::kInvalidArgument, mistake.mentions);
      context.expect(status.message().find("rank 1") != std::string_view::npos &&
                         status.message().find(mistake.mentions) != std::string_view::npos,
                     fmt::format("{}: {}", mistake.mentions, status.message()));
      tensors.expect_untouched(context, mistake.mentions);
    }
    check_combine(context, group, routing, good, 0);
    check_combine(context, group, routing, good, 1);
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, CombineFp8, ::testing::ValuesIn(configs(true)), config_name);

using CombineFp8Refused = CombineFp8;

TEST_P(CombineFp8Refused, OverNodesAndWhereRowsAreVerified) {
  ExchangeCase spec;
  spec.name = "refused";
  spec.world = {.num_ranks = 4, .num_topk = 2, .num_experts = 8, .max_tokens = 4};
  spec.combines = {{.hidden = 128}};
  const PreparedCase prepared = prepare(spec);
  run_with_group(4, [&](RankContext& context, Group& group) {
    const Routing routing = check_route(context, group, prepared);
    if (!routing.present()) return;
    CombineTensors tensors(context, group, prepared, 0);
    tensors.options.wire_format = WireFormat::kFp8;
    const Status status =
        finish(group, group.combine(routing, tensors.in, tensors.out, stream_of(group), tensors.options));
    context.expect_code(status, ErrorCode::kUnsupported, "refused");
    const char* const reason = GetParam().several_nodes ? "a group of 2 nodes" : "GroupOptions::verify";
    context.expect(status.message().find(reason) != std::string_view::npos, status.to_string());
    tensors.expect_untouched(context, "refused: ");
    check_combine(context, group, routing, prepared, 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, CombineFp8Refused, ::testing::ValuesIn(configs(false)), config_name);

}  // namespace
}  // namespace ferry::test
