#include <fmt/format.h>

#include <array>

#include "conformance/backend_config.hpp"
#include "support/exchange_check.hpp"

/// Rows that dispatch quantises on the way.

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

class QuantizeConformance : public Conformance {
 protected:
  /// One case for every layout and kind of memory, with rows that hold no token; `adapt` fills in its dispatches.
  template <typename Adapt>
  static std::vector<ExchangeCase> every_case(int num_ranks, Adapt adapt) {
    std::vector<ExchangeCase> cases;
    for (Layout layout : {Layout::kTokens, Layout::kExperts, Layout::kSlab}) {
      for (MemoryKind memory : {MemoryKind::kSymmetric, MemoryKind::kPlain, MemoryKind::kMixed}) {
        ExchangeCase one;
        one.name = fmt::format("layout {} memory {}", static_cast<int>(layout), static_cast<int>(memory));
        one.world = {.num_ranks = num_ranks, .num_topk = 4, .num_experts = 10, .layout = layout};
        one.world.counts = TokenCounts::kUneven;
        one.world.expert_alignment = 4;
        one.world.spare_slab_rows = 3;
        one.world.spare_recv_rows = layout == Layout::kExperts ? -1 : 5;
        one.world.seed = 70 + cases.size();
        one.memory = memory;
        adapt(one);
        cases.push_back(one);
      }
    }
    return cases;
  }
};

TEST_P(QuantizeConformance, EveryModeLayoutAndStride) {
  for (int num_ranks : {1, 2, 5}) {
    run_cases(num_ranks, every_case(num_ranks, [](ExchangeCase& one) {
                for (const Mode& mode : kModes) {
                  for (ScaleStrides strides : {ScaleStrides::kDense, ScaleStrides::kRowGaps, ScaleStrides::kColumnMajor,
                                               ScaleStrides::kColumnSteps}) {
                    one.dispatches.push_back({.hidden = 272,
                                              .quantize = mode.quantize,
                                              .scale_dtype = mode.scale_dtype,
                                              .scale_strides = strides,
                                              .zero_padding = strides == ScaleStrides::kColumnMajor});
                  }
                }
              }));
  }
}

TEST_P(QuantizeConformance, RowsOfEveryLength) {
  run_cases(
      3, every_case(3, [](ExchangeCase& one) {
        one.gap_granules = 1;
        for (std::int64_t hidden : {16, 112, 128, 144, 512, 1040, 2064}) {
          for (const Mode& mode : {kModes[0], kModes[3], kModes[4]}) {
            one.dispatches.push_back({.hidden = hidden, .quantize = mode.quantize, .scale_dtype = mode.scale_dtype});
          }
        }
      }));
}

TEST_P(QuantizeConformance, OneRoutingManyTimesAndNotAlwaysQuantised) {
  // Cached dispatches: memory for quantised rows grows, is reused, and stays idle while rows travel unquantised.
  run_cases(4, every_case(4, [](ExchangeCase& one) {
              one.dispatches = {{.hidden = 128, .quantize = Quantization::kInt8},
                                {.hidden = 512, .quantize = Quantization::kFp8, .own_weights = true},
                                {.hidden = 512, .num_scales = 4},
                                {.hidden = 128, .quantize = Quantization::kFp8PowerOfTwo, .ask_tables = false},
                                {.hidden = 512, .quantize = Quantization::kFp8Ue8m0, .scale_dtype = DType::kInt32}};
              one.combines = {{.hidden = 512, .weighted = true}};
            }));
}

TEST_P(QuantizeConformance, NoTokensOnSomeRanksAndOnAll) {
  for (RoutingPattern pattern : {RoutingPattern::kNone, RoutingPattern::kDuplicates}) {
    run_cases(3, every_case(3, [pattern](ExchangeCase& one) {
                one.world.pattern = pattern;
                one.dispatches = {{.hidden = 256, .quantize = Quantization::kFp8, .zero_padding = true}};
              }));
  }
  run_cases(2, every_case(2, [](ExchangeCase& one) {
              one.world.max_tokens = 0;
              one.dispatches = {{.hidden = 256, .quantize = Quantization::kInt8}};
            }));
}

TEST_P(QuantizeConformance, AModelsRow) {
  std::vector<ExchangeCase> cases;
  for (MemoryKind memory : {MemoryKind::kSymmetric, MemoryKind::kPlain}) {
    ExchangeCase one;
    one.name = "a model's row";
    one.world = {.num_ranks = 8, .num_topk = 8, .num_experts = 256, .max_tokens = 6};
    one.memory = memory;
    for (const Mode& mode : kModes) {
      one.dispatches.push_back({.hidden = 7168,
                                .quantize = mode.quantize,
                                .scale_dtype = mode.scale_dtype,
                                .scale_strides = ScaleStrides::kColumnMajor});
    }
    cases.push_back(one);
  }
  run_cases(8, cases);
}

TEST_P(QuantizeConformance, MistakesAreRefusedOnEveryRank) {
  ExchangeCase spec;
  spec.name = "good case";
  spec.world = {.num_ranks = 3, .num_topk = 2, .num_experts = 6, .max_tokens = 4};
  spec.dispatches = {{.hidden = 256, .quantize = Quantization::kFp8},
                     {.hidden = 256, .quantize = Quantization::kFp8Ue8m0, .scale_dtype = DType::kInt32},
                     {.hidden = 256, .quantize = Quantization::kInt8}};
  const PreparedCase good = prepare(spec);
  struct Mistake {
    std::size_t dispatch_idx;
    const char* mentions;
    std::function<void(DispatchTensors&)> spoil;
  };
  const std::vector<Mistake> mistakes = {
      {0, "quantize is 9, expected kNone, kFp8", [](auto& call) { call.options.quantize = Quantization{9}; }},
      {0, "ranks disagree on quantize", [](auto& call) { call.options.quantize = Quantization::kFp8PowerOfTwo; }},
      {0, "output x is", [](auto& call) { call.options.quantize = Quantization::kNone; }},
      {0, "expected i8 of the same H (quantize is kInt8)",
       [](auto& call) { call.options.quantize = Quantization::kInt8; }},
      {0, "expected u8 or i32 (quantize is kFp8Ue8m0)",
       [](auto& call) { call.options.quantize = Quantization::kFp8Ue8m0; }},
      {0, "f16, expected bf16 to quantise", [](auto& call) { call.in.x.dtype = DType::kFloat16; }},
      {0, "input scales are", [](auto& call) { call.in.scales = call.out.scales; }},
      {0, "output scales are absent, expected f32", [](auto& call) { call.out.scales = {}; }},
      {0, "for an H of 256: one for 128 channels", [](auto& call) { call.out.scales.shape[1] = 1; }},
      {0, "expected fp8_e4m3 of the same H", [](auto& call) { call.out.x.dtype = DType::kUint8; }},
      {0, "expected fp8_e4m3 of the same H", [](auto& call) { call.out.x.shape[1] = 128; }},
      {0, "elements overlap", [](auto& call) { call.out.scales.strides[0] = 0; }},
      {1, "for an H of 256: one for 512 channels", [](auto& call) { call.out.scales.shape[1] = 2; }},
      {1, "expected u8 or i32", [](auto& call) { call.out.scales.dtype = DType::kFloat32; }},
      {2, "expected f32 (quantize is kInt8)", [](auto& call) { call.out.scales.dtype = DType::kInt32; }},
  };
  run_with_group(3, [&](RankContext& context, Group& group) {
    const Routing routing = check_route(context, group, good);
    if (!routing.present()) return;
    for (const Mistake& mistake : mistakes) {
      DispatchTensors tensors(context, group, good, mistake.dispatch_idx);
      if (context.rank() == 2) mistake.spoil(tensors);
      const Status status =
          finish(group, group.dispatch(routing, tensors.in, tensors.out, stream_of(group), tensors.options));
      context.expect_code(status, ErrorCode::kInvalidArgument, mistake.mentions);
      context.expect(status.message().find(mistake.mentions) != std::string_view::npos,
                     fmt::format("expected \"{}\": {}", mistake.mentions, status.message()));
      tensors.expect_untouched(context, mistake.mentions);
    }
    for (std::size_t i = 0; i < good.dispatches.size(); ++i) check_dispatch(context, group, routing, good, i);
  });
}

TEST_P(QuantizeConformance, WithoutRoomForTheQuantisedRowsEveryRankIsTold) {
  ExchangeCase spec;
  spec.name = "no room";
  spec.world = {.num_ranks = 2, .num_topk = 2, .num_experts = 6, .max_tokens = 10};
  spec.dispatches = {{.hidden = 1024, .quantize = Quantization::kFp8}};
  const PreparedCase one = prepare(spec);
  run_with_group(2, [&](RankContext& context, Group& group) {
    const Routing routing = check_route(context, group, one);
    if (!routing.present()) return;
    {
      DispatchTensors tensors(context, group, one, 0);
      std::vector<Buffer> full;
      constexpr std::size_t kSmallest = 4096;
      for (std::size_t bytes = group_options(context).arena_bytes; context.rank() == 1 && bytes >= kSmallest;) {
        Result<Buffer> taken = group.allocate(bytes);
        if (taken.ok()) {
          full.push_back(std::move(*taken));
        } else {
          bytes /= 2;
        }
      }
      const Status status =
          finish(group, group.dispatch(routing, tensors.in, tensors.out, stream_of(group), tensors.options));
      context.expect_code(status, ErrorCode::kCapacity, "a full arena");
      context.expect(status.message().find("rank 1") != std::string_view::npos, status.to_string());
      tensors.expect_untouched(context, "a full arena");
    }
    check_dispatch(context, group, routing, one, 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, QuantizeConformance, ::testing::ValuesIn(exchange_configs()), config_name);

}  // namespace
}  // namespace ferry::test
