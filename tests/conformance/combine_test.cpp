#include <fmt/format.h>

#include <cstring>

#include "conformance/backend_config.hpp"
#include "support/exchange_check.hpp"

namespace ferry::test {
namespace {

constexpr std::array<Layout, 3> kLayouts = {Layout::kTokens, Layout::kExperts, Layout::kSlab};

class CombineConformance : public Conformance {
 protected:
  /// Runs the combines on every layout and kind of memory, with some rows that hold no token.
  void run_combines(int num_ranks, const std::vector<CombineSpec>& combines,
                    RoutingPattern pattern = RoutingPattern::kRandom) const {
    std::vector<ExchangeCase> cases;
    for (Layout layout : kLayouts) {
      for (MemoryKind memory : {MemoryKind::kSymmetric, MemoryKind::kPlain, MemoryKind::kMixed}) {
        ExchangeCase one;
        one.name = fmt::format("layout {} memory {}", static_cast<int>(layout), static_cast<int>(memory));
        one.world = {.num_ranks = num_ranks, .num_topk = 5, .num_experts = 11, .pattern = pattern, .layout = layout};
        one.world.counts = TokenCounts::kUneven;
        one.world.expert_alignment = 3;
        one.world.spare_slab_rows = 2;
        one.world.spare_recv_rows = memory == MemoryKind::kPlain ? -1 : 4;
        one.world.seed = 70 + cases.size();
        one.memory = memory;
        one.gap_granules = memory == MemoryKind::kPlain ? 1 : 0;
        one.slab_view = memory == MemoryKind::kPlain;
        one.combines = combines;
        cases.push_back(one);
      }
    }
    run_cases(num_ranks, cases);
  }

  static std::vector<CombineSpec> every_combine(DType dtype, Values values) {
    std::vector<CombineSpec> combines;
    for (bool weighted : {false, true}) {
      for (int num_biases : {0, 1, 2}) {
        CombineSpec combine{.dtype = dtype, .weighted = weighted, .num_biases = num_biases, .values = values};
        combine.return_weights = num_biases != 1;
        combine.own_weights = num_biases == 2;
        combines.push_back(combine);
      }
    }
    return combines;
  }
};

TEST_P(CombineConformance, Bfloat16) {
  for (int num_ranks : {1, 2, 3, 5, 8}) run_combines(num_ranks, every_combine(DType::kBfloat16, Values::kRandom));
}

TEST_P(CombineConformance, Float32) {
  for (int num_ranks : {1, 2, 3, 5, 8}) run_combines(num_ranks, every_combine(DType::kFloat32, Values::kRandom));
}

TEST_P(CombineConformance, SpecialValues) {
  run_combines(1, every_combine(DType::kBfloat16, Values::kSpecial));
  run_combines(4, every_combine(DType::kBfloat16, Values::kSpecial));
  run_combines(4, every_combine(DType::kFloat32, Values::kSpecial));
}

TEST_P(CombineConformance, DuplicateExperts) {
  run_combines(3, every_combine(DType::kBfloat16, Values::kRandom), RoutingPattern::kDuplicates);
  run_combines(3, every_combine(DType::kFloat32, Values::kRandom), RoutingPattern::kDuplicates);
}

/// Most rows that a token can have, and most entries that share one row; both with all biases.
TEST_P(CombineConformance, AsManyEntriesAsATokenCanHave) {
  std::vector<CombineSpec> combines;
  for (const DType dtype : {DType::kBfloat16, DType::kFloat32}) {
    for (const bool weighted : {false, true}) {
      combines.push_back({.dtype = dtype,
                          .hidden = 520,
                          .weighted = weighted,
                          .own_weights = weighted,
                          .num_biases = 2,
                          .return_weights = true});
    }
  }
  for (const RoutingPattern pattern : {RoutingPattern::kRandom, RoutingPattern::kDuplicates}) {
    std::vector<ExchangeCase> cases;
    for (const Layout layout : kLayouts) {
      for (const MemoryKind memory : {MemoryKind::kSymmetric, MemoryKind::kPlain}) {
        ExchangeCase one;
        one.name = fmt::format("layout {} memory {}", static_cast<int>(layout), static_cast<int>(memory));
        one.world = {.num_ranks = 3, .num_topk = kMaxTopk, .num_experts = 40, .pattern = pattern, .layout = layout};
        one.world.seed = 90 + cases.size();
        one.memory = memory;
        one.dispatches = {{.hidden = 520, .num_scales = 3}};
        one.combines = combines;
        cases.push_back(one);
      }
    }
    run_cases(3, cases);
    if (on_gpus()) run_cases(3, cases, {.copy_path = CopyPath::kLoadStore});
  }
}

TEST_P(CombineConformance, TokensWithoutExpertsGetTheirBiases) {
  run_combines(2, every_combine(DType::kFloat32, Values::kRandom), RoutingPattern::kNone);
  run_combines(2, every_combine(DType::kBfloat16, Values::kSpecial), RoutingPattern::kNone);
}

TEST_P(CombineConformance, RowsThatFillNoVectorRegister) {
  std::vector<CombineSpec> combines;
  for (std::int64_t granules : {1, 2, 3, 5, 7, 9, 15, 17, 33, 65}) {
    combines.push_back({.dtype = DType::kBfloat16, .hidden = granules * 8, .weighted = granules % 2 == 1});
    combines.push_back({.dtype = DType::kFloat32, .hidden = granules * 4, .weighted = granules % 2 == 0});
  }
  run_combines(3, combines);
}

/// Dispatch then unweighted combine of unchanged rows multiplies each token by the number of its rows. Small integers
/// keep that exact in bf16 too.
TEST_P(CombineConformance, ReturnsEachTokenTimesItsRows) {
  constexpr int kNumRanks = 4;
  constexpr std::int64_t kHidden = 24;
  for (Layout layout : kLayouts) {
    ExchangeCase spec;
    spec.name = fmt::format("round trip, layout {}", static_cast<int>(layout));
    spec.world = {.num_ranks = kNumRanks, .num_topk = 4, .num_experts = 12, .layout = layout};
    const PreparedCase prepared = prepare(spec);
    run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
      const Routing routing = check_route(context, group, prepared);
      if (!routing.present()) return;
      const std::int64_t num_tokens = routing.num_tokens();
      std::vector<float> x(static_cast<std::size_t>(num_tokens * kHidden));
      for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 13) - 6.0F;
      const bool on_device = uses_device(group);
      PlainMemory x_memory(on_device, x);
      PlainMemory recv(on_device, static_cast<std::size_t>(routing.num_recv_rows() * kHidden) * sizeof(float));
      PlainMemory out_memory(on_device, x.size() * sizeof(float));
      const TensorView x_view(x_memory.data(), DType::kFloat32, {num_tokens, kHidden});
      const TensorView recv_view(recv.data(), DType::kFloat32, {routing.num_recv_rows(), kHidden});
      const TensorView out_view(out_memory.data(), DType::kFloat32, {num_tokens, kHidden});
      const Stream stream = stream_of(group);
      Status status = group.dispatch(routing, {x_view, {}, {}}, {recv_view, {}, {}, {}, {}}, stream);
      if (!context.expect_ok(finish(group, status), "dispatch")) return;
      status = group.combine(routing, {recv_view, {}, {}, {}}, {out_view, {}}, stream);
      if (!context.expect_ok(finish(group, status), "combine")) return;
      std::vector<float> out(x.size());
      const Bytes sums = read_memory(on_device, out_memory.data(), out.size() * sizeof(float));
      if (!sums.empty()) std::memcpy(out.data(), sums.data(), sums.size());
      const auto rank = static_cast<std::size_t>(context.rank());
      for (std::int64_t token = 0; token < num_tokens; ++token) {
        float num_rows = 0;
        for (const auto& receiver : prepared.routings)
          for (const auto& source : receiver.source)
            if (source == oracle::Source{static_cast<std::int32_t>(rank), static_cast<std::int32_t>(token)})
              num_rows += 1;
        for (std::int64_t h = 0; h < kHidden; ++h) {
          const auto at = static_cast<std::size_t>(token * kHidden + h);
          if (!context.expect(out[at] == num_rows * x[at], "the sum is not the token times its number of rows")) return;
        }
      }
    });
  }
}

/// Rows of a tensor without the gaps between them.
Bytes rows_of(bool on_device, const ConstTensorView& view) {
  Bytes rows;
  const auto element_bytes = static_cast<std::int64_t>(size_bytes(view.dtype));
  for (std::int64_t row = 0; row < view.extent(0); ++row) {
    const auto* data = static_cast<const std::byte*>(view.data) + row * view.stride(0) * element_bytes;
    const Bytes bytes = read_memory(on_device, data, static_cast<std::size_t>(view.extent(1) * element_bytes));
    rows.insert(rows.end(), bytes.begin(), bytes.end());
  }
  return rows;
}

TEST_P(CombineConformance, TheSumMayReplaceABias) {
  constexpr int kNumRanks = 4;
  ExchangeCase spec;
  spec.name = "sum in place of a bias";
  spec.world = {.num_ranks = kNumRanks, .num_topk = 4, .num_experts = 8, .max_tokens = 40};
  // Few and many rows, narrow and wide rows: kernels read them in different steps.
  spec.combines = {{.hidden = 16, .num_biases = 2},
                   {.hidden = 4096, .weighted = true, .num_biases = 2},
                   {.dtype = DType::kFloat32, .hidden = 2056, .num_biases = 1}};
  if (ranks_per_node(kNumRanks) == kNumRanks && !GetParam().verify) {
    spec.combines.push_back({.hidden = 1152, .num_biases = 2, .wire_format = WireFormat::kFp8});
    spec.combines.push_back(
        {.dtype = DType::kFloat32, .hidden = 640, .num_biases = 2, .wire_format = WireFormat::kFp8});
  }
  const PreparedCase prepared = prepare(spec);
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    const Routing routing = check_route(context, group, prepared);
    if (!routing.present()) return;
    for (std::size_t i = 0; i < prepared.combines.size(); ++i) {
      CombineTensors apart(context, group, prepared, i);
      const Stream stream = stream_of(group);
      Status status = group.combine(routing, apart.in, apart.out, stream, apart.options);
      if (!context.expect_ok(finish(group, status), "apart")) return;
      for (std::size_t bias = 0; bias < static_cast<std::size_t>(prepared.spec.combines[i].num_biases); ++bias) {
        CombineTensors in_place(context, group, prepared, i);
        const ConstTensorView& replaced = in_place.in.bias[bias];
        in_place.out.x.data = const_cast<void*>(replaced.data);
        in_place.out.x.strides = replaced.strides;
        status = group.combine(routing, in_place.in, in_place.out, stream, in_place.options);
        if (!context.expect_ok(finish(group, status), "in place")) return;
        context.expect(rows_of(uses_device(group), in_place.out.x) == rows_of(uses_device(group), apart.out.x),
                       fmt::format("combine {}: the sum in place of bias {} differs", i, bias));
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, CombineConformance, ::testing::ValuesIn(exchange_configs()), config_name);

}  // namespace
}  // namespace ferry::test
