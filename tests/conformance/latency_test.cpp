#include <fmt/format.h>

#include <array>
#include <limits>

#include "conformance/latency_conformance.hpp"
#include "support/device_memory.hpp"

/// Calls of latency mode, one at a time: every byte of rows, scales, padding, Routing and sums equals the oracle's.

namespace ferry::test {
namespace {

struct Mode {
  Quantization quantize;
  DType scale_dtype;
};

constexpr std::array<Mode, 5> kModes = {
    Mode{Quantization::kFp8, DType::kFloat32}, Mode{Quantization::kFp8PowerOfTwo, DType::kFloat32},
    Mode{Quantization::kFp8Ue8m0, DType::kUint8}, Mode{Quantization::kFp8Ue8m0, DType::kInt32},
    Mode{Quantization::kInt8, DType::kFloat32}};

constexpr std::int64_t kHidden = 32;
constexpr std::int64_t kWordsHidden = 1032;
constexpr std::array<std::int64_t, 4> kSpareTokens = {0, 1, kManyTokens, 4};
constexpr std::array<ScaleStrides, 6> kScaleStrides = {ScaleStrides::kDense,       ScaleStrides::kRowGaps,
                                                       ScaleStrides::kColumnMajor, ScaleStrides::kColumnSteps,
                                                       ScaleStrides::kSlabRows,    ScaleStrides::kSlabColumns};

class LatencyExchanges : public LatencyConformance {
 protected:
  /// Small case in every kind of memory and view of the slab.
  template <typename Adapt>
  static std::vector<ExchangeCase> every_memory(int num_ranks, Adapt adapt) {
    std::vector<ExchangeCase> cases;
    for (const MemoryKind memory : {MemoryKind::kSymmetric, MemoryKind::kPlain, MemoryKind::kMixed}) {
      ExchangeCase one = small_latency_case(num_ranks, 300 + cases.size());
      one.name = fmt::format("memory {}", static_cast<int>(memory));
      one.memory = memory;
      one.slab_view = memory != MemoryKind::kPlain;
      one.gap_granules = memory == MemoryKind::kMixed ? 1 : 0;
      one.id_dtype = memory == MemoryKind::kPlain ? DType::kInt32 : DType::kInt64;
      adapt(one);
      cases.push_back(one);
    }
    return cases;
  }

  static std::vector<CombineSpec> every_combine(DType dtype, Values values) {
    std::vector<CombineSpec> combines;
    for (const CombineOrder order : {CombineOrder::kExact, CombineOrder::kRankSums}) {
      for (const bool own_weights : {false, true}) {
        // Sums of each rank that travel as words end within a step.
        combines.push_back({.dtype = dtype,
                            .hidden = order == CombineOrder::kRankSums ? kWordsHidden : kHidden,
                            .weighted = true,
                            .order = order,
                            .own_weights = own_weights,
                            .values = values});
      }
    }
    return combines;
  }
};

TEST_P(LatencyExchanges, EveryPatternAndTokenCount) {
  for (const int num_ranks : {1, 2, 3, 5, 8}) {
    std::vector<ExchangeCase> cases;
    for (int pattern = 0; pattern <= static_cast<int>(RoutingPattern::kDuplicates); ++pattern) {
      for (int counts = 0; counts <= static_cast<int>(TokenCounts::kAllZero); ++counts) {
        ExchangeCase one = small_latency_case(num_ranks, static_cast<std::uint64_t>(100 * pattern + counts));
        one.name = fmt::format("pattern {} counts {}", pattern, counts);
        one.world.pattern = static_cast<RoutingPattern>(pattern);
        one.world.counts = static_cast<TokenCounts>(counts);
        one.world.spare_slab_rows = counts;
        one.spare_max_tokens = kSpareTokens[static_cast<std::size_t>(counts) % kSpareTokens.size()];
        one.dispatches[0].zero_padding = pattern % 2 == 0;
        cases.push_back(one);
      }
    }
    run_latency_cases(num_ranks, cases);
  }
}

TEST_P(LatencyExchanges, ExpertsThatRanksDoNotDivideAndRanksWithoutAny) {
  for (const int num_ranks : {2, 3, 5, 8}) {
    std::vector<ExchangeCase> cases;
    for (const std::int64_t num_experts : {1, 2, 7, 60}) {
      for (const bool custom : {false, true}) {
        ExchangeCase one = small_latency_case(num_ranks, static_cast<std::uint64_t>(num_experts));
        one.name = fmt::format("E {} custom {}", num_experts, custom);
        one.world.num_experts = num_experts;
        one.world.custom_placement = custom;
        one.slab_view = custom;
        one.dispatches[0].scale_strides = ScaleStrides::kSlabColumns;
        cases.push_back(one);
      }
    }
    run_latency_cases(num_ranks, cases);
  }
}

TEST_P(LatencyExchanges, QuantisedOnTheWayWithScalesOfAnyStrides) {
  for (const int num_ranks : {1, 2, 5}) {
    run_latency_cases(num_ranks, every_memory(num_ranks, [](ExchangeCase& one) {
                        one.dispatches.clear();
                        one.combines.clear();
                        for (const Mode& mode : kModes) {
                          for (const ScaleStrides strides : kScaleStrides) {
                            one.dispatches.push_back({.hidden = 656,
                                                      .quantize = mode.quantize,
                                                      .scale_dtype = mode.scale_dtype,
                                                      .scale_strides = strides,
                                                      .zero_padding = one.dispatches.size() % 2 == 1});
                          }
                        }
                      }));
  }
}

TEST_P(LatencyExchanges, AlreadyQuantisedWithScalesOfAnyTypeAndStrides) {
  for (const int num_ranks : {1, 3}) {
    run_latency_cases(num_ranks, every_memory(num_ranks, [](ExchangeCase& one) {
                        one.dispatches.clear();
                        one.combines.clear();
                        for (const DType scale_dtype : {DType::kFloat32, DType::kInt32, DType::kUint8}) {
                          for (const ScaleStrides strides : kScaleStrides) {
                            one.dispatches.push_back({.dtype = DType::kFloat8E4M3,
                                                      .hidden = 256,
                                                      .num_scales = strides == ScaleStrides::kRowGaps ? 1 : 5,
                                                      .scale_dtype = scale_dtype,
                                                      .scale_strides = strides,
                                                      .zero_padding = one.dispatches.size() % 2 == 0});
                          }
                        }
                      }));
  }
}

TEST_P(LatencyExchanges, RowsOfAnyTypeAndLengthWithoutScales) {
  run_latency_cases(
      3, every_memory(3, [](ExchangeCase& one) {
        one.dispatches.clear();
        one.combines.clear();
        for (const std::int64_t granules : {1, 3, 8, 17, 65}) {
          one.dispatches.push_back({.dtype = DType::kBfloat16, .hidden = granules * 8});
          one.dispatches.push_back({.dtype = DType::kUint8, .hidden = granules * 16, .zero_padding = true});
          one.combines.push_back({.hidden = granules * 8,
                                  .weighted = true,
                                  .order = granules % 2 == 0 ? CombineOrder::kExact : CombineOrder::kRankSums});
        }
      }));
}

TEST_P(LatencyExchanges, CombinesInBothOrdersWeighedByDispatchOrByThemselves) {
  for (const int num_ranks : {1, 2, 4, 8}) {
    run_latency_cases(num_ranks, every_memory(num_ranks, [](ExchangeCase& one) {
                        one.world.num_topk = 6;
                        const bool special = one.memory == MemoryKind::kMixed;
                        const Values values = special ? Values::kSpecial : Values::kRandom;
                        one.combines = every_combine(DType::kBfloat16, values);
                        for (const CombineSpec& combine : every_combine(DType::kFloat32, values)) {
                          one.combines.push_back(combine);
                        }
                      }));
  }
}

TEST_P(LatencyExchanges, OnlyTheFirstTokensCount) {
  for (const int num_ranks : {1, 2, 3, 5}) {
    run_latency_cases(num_ranks, every_memory(num_ranks, [](ExchangeCase& one) {
                        one.world.idle_tail = true;
                        one.world.max_tokens = 12;
                        one.spare_max_tokens = one.slab_view ? kManyTokens : 0;
                        one.dispatches[0].zero_padding = one.slab_view;
                        one.combines = every_combine(DType::kBfloat16, Values::kRandom);
                      }));
  }
}

/// A count below 0 means 0, and one above T means T: the ids are those of a case without a count.
TEST_P(LatencyExchanges, ACountOutOfRangeIsTheNearestInRange) {
  constexpr int kNumRanks = 3;
  ExchangeCase spec = small_latency_case(kNumRanks);
  spec.world.counts = TokenCounts::kEven;
  spec.world.fixed_rows = kNumRanks * spec.world.max_tokens;
  const PreparedCase all = prepare_latency(spec);
  spec.world.pattern = RoutingPattern::kNone;
  const PreparedCase none = prepare_latency(spec);
  using Limits = std::numeric_limits<std::int32_t>;
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    for (const std::int32_t count : {7, Limits::max(), -1, Limits::min()}) {
      PlainMemory memory(uses_device(group), std::vector<std::int32_t>{count});
      const LatencyDispatchTensors ids(context, group, all, 0);
      LatencyDispatchTensors tensors(context, group, count < 0 ? none : all, 0);
      tensors.in.topk_idx = ids.in.topk_idx;
      tensors.in.num_tokens_view = ConstTensorView(memory.data(), DType::kInt32, {1});
      if (!context.expect_ok(call_dispatch(group, tensors), "dispatch")) return;
      tensors.expect_received(context, fmt::format("{} tokens: ", count));
    }
  });
}

TEST_P(LatencyExchanges, ExpertsNamedTwice) {
  run_latency_cases(3, every_memory(3, [](ExchangeCase& one) {
                      one.world.pattern = RoutingPattern::kDuplicates;
                      one.world.num_topk = 7;
                      one.combines = every_combine(DType::kBfloat16, Values::kRandom);
                    }));
}

TEST_P(LatencyExchanges, WithoutWeightsOfTheDispatch) {
  run_latency_cases(3, every_memory(3, [](ExchangeCase& one) {
                      one.world.weights = false;
                      for (CombineSpec& combine : one.combines) combine.own_weights = true;
                    }));
}

TEST_P(LatencyExchanges, AsManyEntriesAsATokenCanHave) {
  for (const RoutingPattern pattern : {RoutingPattern::kRandom, RoutingPattern::kDuplicates}) {
    run_latency_cases(4, every_memory(4, [pattern](ExchangeCase& one) {
                        one.world.num_topk = kMaxTopk;
                        one.world.num_experts = 40;
                        one.world.pattern = pattern;
                        one.combines = every_combine(DType::kBfloat16, Values::kRandom);
                      }));
  }
}

/// R * M rows for each expert are always enough, even if all tokens go to one.
TEST_P(LatencyExchanges, ASlabThatOneExpertFills) {
  constexpr int kNumRanks = 4;
  ExchangeCase one = small_latency_case(kNumRanks);
  one.world.pattern = RoutingPattern::kOneHot;
  one.world.counts = TokenCounts::kEven;
  one.world.fixed_rows = kNumRanks * one.world.max_tokens;
  one.slab_view = true;
  run_latency_cases(kNumRanks, {one});
}

TEST_P(LatencyExchanges, AModelsRow) {
  ExchangeCase one = small_latency_case(8, 40);
  one.name = "a model's row";
  one.world.num_topk = 8;
  one.world.num_experts = 64;
  one.world.max_tokens = 4;
  one.memory = MemoryKind::kMixed;
  one.slab_view = true;
  one.dispatches = {{.hidden = 7168, .quantize = Quantization::kFp8, .scale_strides = ScaleStrides::kSlabColumns},
                    {.hidden = 7168}};
  for (CombineSpec& combine : one.combines) combine.hidden = 7168;
  run_latency_cases(8, {one});
}

TEST_P(LatencyExchanges, SixteenRanks) {
  // Each rank uses two streams that wait for others, and the threads of a process have 32 connections to a GPU.
  constexpr int kMostOnOneGpu = 10;
  if (on_gpus() && GetParam().several_nodes && 16 > kMostOnOneGpu * num_devices()) {
    GTEST_SKIP() << "16 rank threads over nodes need two GPUs, this machine has " << num_devices();
  }
  ExchangeCase one = small_latency_case(16);
  one.world.num_topk = 8;
  one.world.num_experts = 50;
  run_latency_cases(16, {one});
}

/// A CUDA group has no tables for throughput calls on this Routing: it refuses them, and stays usable.
void expect_no_other_calls(RankContext& context, Group& group, const LatencyExchange& exchange) {
  DispatchTensors dispatch(context, group, exchange.prepared(), 1);
  CombineTensors combine(context, group, exchange.prepared(), 2);
  const auto refused = [&](const char* call, const Status& status) {
    const auto words = [call](int rank) {
      return fmt::format("rank {}: {}: the Routing was made by latency_dispatch, expected one of route", rank, call);
    };
    expect_own_refusals(context, group, finish(group, status), {ErrorCode::kUnsupported, call, words});
  };
  const Stream stream = stream_of(group);
  refused("dispatch", group.dispatch(exchange.routing(), dispatch.in, dispatch.out, stream, dispatch.options));
  refused("combine", group.combine(exchange.routing(), combine.in, combine.out, stream, combine.options));
  dispatch.expect_untouched(context, "a refused dispatch: ");
  combine.expect_untouched(context, "a refused combine: ");
}

/// Backends that support it accept the Routing in all calls that accept one made by `route`.
TEST_P(LatencyExchanges, OtherCallsTakeTheRouting) {
  ExchangeCase spec = small_latency_case(4);
  // Throughput calls have shapes of their own.
  spec.dispatches.push_back({.dtype = DType::kFloat32, .hidden = 100, .own_weights = true});
  spec.combines.push_back({.dtype = DType::kFloat32, .hidden = 40, .num_biases = 2, .return_weights = true});
  const PreparedCase prepared = prepare_latency(spec);
  run_with_group(4, [&](RankContext& context, Group& group) {
    for (const bool split : {false, true}) {
      LatencyExchange exchange(context, group, prepared);
      if (split ? !(exchange.send_dispatch() && exchange.receive()) : !exchange.dispatch()) return;
      if (on_gpus()) {
        expect_no_other_calls(context, group, exchange);
        if (!exchange.combine(1)) return;
        continue;
      }
      check_dispatch(context, group, exchange.routing(), prepared, 1);
      check_combine(context, group, exchange.routing(), prepared, 2);
      if (!exchange.combine(1)) return;
      check_dispatch(context, group, exchange.routing(), prepared, 1);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, LatencyExchanges, ::testing::ValuesIn(backend_configs()), config_name);

}  // namespace
}  // namespace ferry::test
