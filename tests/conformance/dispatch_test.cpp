#include <fmt/format.h>

#include "conformance/backend_config.hpp"
#include "support/exchange_check.hpp"

namespace ferry::test {
namespace {

constexpr std::array<Layout, 3> kLayouts = {Layout::kTokens, Layout::kExperts, Layout::kSlab};

class DispatchConformance : public Conformance {
 protected:
  /// Case in `layout` with gaps between rows that hold tokens and unused rows behind them.
  static ExchangeCase ragged_case(Layout layout, int num_ranks, MemoryKind memory) {
    ExchangeCase one;
    one.name =
        fmt::format("layout {} {}", static_cast<int>(layout), memory == MemoryKind::kSymmetric ? "symmetric" : "plain");
    one.world = {.num_ranks = num_ranks, .num_topk = 4, .num_experts = 10, .layout = layout};
    one.world.counts = TokenCounts::kUneven;
    one.world.expert_alignment = 4;
    one.world.spare_slab_rows = 3;
    one.world.spare_recv_rows = layout == Layout::kExperts ? -1 : 5;
    one.memory = memory;
    return one;
  }

  /// One case for every layout and kind of memory; `adapt` fills in its dispatches.
  template <typename Adapt>
  static std::vector<ExchangeCase> every_case(int num_ranks, Adapt adapt) {
    std::vector<ExchangeCase> cases;
    for (Layout layout : kLayouts) {
      for (MemoryKind memory : {MemoryKind::kSymmetric, MemoryKind::kPlain, MemoryKind::kMixed}) {
        ExchangeCase one = ragged_case(layout, num_ranks, memory);
        one.world.seed = 40 + cases.size();
        adapt(one);
        cases.push_back(one);
      }
    }
    return cases;
  }
};

TEST_P(DispatchConformance, EveryPayloadType) {
  for (int num_ranks : {1, 2, 5}) {
    run_cases(num_ranks, every_case(num_ranks, [](ExchangeCase& one) {
                for (DType dtype : {DType::kBfloat16, DType::kFloat16, DType::kFloat32, DType::kFloat8E4M3,
                                    DType::kUint8, DType::kInt32, DType::kInt64}) {
                  for (std::int64_t row_bytes : {16, 48, 336})
                    one.dispatches.push_back(
                        {.dtype = dtype, .hidden = row_bytes / static_cast<std::int64_t>(size_bytes(dtype))});
                }
              }));
  }
}

TEST_P(DispatchConformance, ScalesOfAnyTypeWidthAndStrides) {
  for (int num_ranks : {1, 3, 8}) {
    run_cases(num_ranks, every_case(num_ranks, [](ExchangeCase& one) {
                for (DType scale_dtype : {DType::kFloat32, DType::kInt32, DType::kUint8}) {
                  for (ScaleStrides strides : {ScaleStrides::kDense, ScaleStrides::kRowGaps, ScaleStrides::kColumnMajor,
                                               ScaleStrides::kColumnSteps}) {
                    one.dispatches.push_back({.dtype = DType::kFloat8E4M3,
                                              .hidden = 64,
                                              .num_scales = strides == ScaleStrides::kDense ? 1 : 7,
                                              .scale_dtype = scale_dtype,
                                              .scale_strides = strides,
                                              .zero_padding = scale_dtype == DType::kInt32});
                  }
                }
              }));
  }
}

TEST_P(DispatchConformance, RowsWithGapsBetweenThem) {
  run_cases(3, every_case(3, [](ExchangeCase& one) {
              one.gap_granules = 3;
              one.dispatches = {{.hidden = 40}, {.hidden = 40, .zero_padding = true}};
            }));
}

TEST_P(DispatchConformance, PaddingIsClearedOnRequestAndUntouchedOtherwise) {
  for (int num_ranks : {1, 2, 5}) {
    run_cases(num_ranks, every_case(num_ranks, [](ExchangeCase& one) {
                one.dispatches = {{.num_scales = 2, .zero_padding = true}, {.num_scales = 2, .zero_padding = false}};
              }));
    run_cases(num_ranks, every_case(num_ranks, [](ExchangeCase& one) {
                one.world.pattern = RoutingPattern::kNone;
                one.dispatches = {{.num_scales = 2, .zero_padding = true}, {.num_scales = 2, .zero_padding = false}};
              }));
  }
}

TEST_P(DispatchConformance, WithAndWithoutWeightsAndTables) {
  run_cases(3, every_case(3, [](ExchangeCase& one) {
              one.dispatches = {{.ask_tables = false}, {.id_dtype = DType::kInt32}, {.own_weights = true}};
            }));
  run_cases(3, every_case(3, [](ExchangeCase& one) {
              one.world.weights = false;
              one.dispatches = {{}, {.ask_tables = false}, {.own_weights = true}};
            }));
}

TEST_P(DispatchConformance, DuplicateExpertsAddTheirWeights) {
  run_cases(4, every_case(4, [](ExchangeCase& one) {
              one.world.pattern = RoutingPattern::kDuplicates;
              one.world.num_topk = 6;
              one.dispatches = {{}, {.own_weights = true}};
            }));
}

TEST_P(DispatchConformance, SlabsAsThreeDimensions) {
  ExchangeCase one = ragged_case(Layout::kSlab, 3, MemoryKind::kSymmetric);
  one.slab_view = true;
  one.dispatches = {{}, {.zero_padding = true}};
  ExchangeCase gaps = one;
  gaps.memory = MemoryKind::kPlain;
  gaps.gap_granules = 1;
  run_cases(3, {one, gaps});
}

TEST_P(DispatchConformance, OneRoutingManyTimes) {
  // Cached dispatches with other payloads, dtypes and weights; the last has the first one's shapes again.
  run_cases(4, every_case(4, [](ExchangeCase& one) {
              one.dispatches = {{.hidden = 8},
                                {.dtype = DType::kFloat32, .hidden = 100, .own_weights = true},
                                {.dtype = DType::kFloat8E4M3, .hidden = 256, .num_scales = 2},
                                {.dtype = DType::kUint8, .hidden = 16, .zero_padding = true},
                                {.hidden = 8, .own_weights = true}};
            }));
}

TEST_P(DispatchConformance, AModelsRow) {
  ExchangeCase one = ragged_case(Layout::kTokens, 8, MemoryKind::kSymmetric);
  one.world.num_topk = 8;
  one.world.num_experts = 256;
  one.world.max_tokens = 20;
  one.dispatches = {{.hidden = 7168},
                    {.dtype = DType::kFloat8E4M3,
                     .hidden = 7168,
                     .num_scales = 56,
                     .scale_strides = ScaleStrides::kColumnMajor,
                     .zero_padding = true}};
  one.combines = {{.hidden = 7168, .weighted = true}};
  ExchangeCase plain = one;
  plain.memory = MemoryKind::kPlain;
  run_cases(8, {one, plain});
}

TEST_P(DispatchConformance, SixteenRanks) {
  run_cases(16, every_case(16, [](ExchangeCase& one) {
              one.world.num_experts = 40;
              one.dispatches = {{.num_scales = 3}};
              one.combines = {{.weighted = true, .return_weights = true}};
            }));
}

INSTANTIATE_TEST_SUITE_P(Backends, DispatchConformance, ::testing::ValuesIn(exchange_configs()), config_name);

}  // namespace
}  // namespace ferry::test
