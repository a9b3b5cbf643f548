#include <fmt/format.h>

#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "conformance/latency_conformance.hpp"

/// Arguments of latency mode that one rank gets wrong, or that ranks disagree on: every rank gets the same error,
/// whether its call is split or not, nothing is written, and the group stays usable.

namespace ferry::test {
namespace {

constexpr int kNumRanks = 3;

struct DispatchMistake {
  std::string name;
  std::function<void(LatencyDispatchTensors&)> spoil;
};

struct CombineMistake {
  std::string name;
  std::function<void(LatencyCombineTensors&)> spoil;
};

template <typename Mistake, typename Select>
void add_view_mistakes(std::vector<Mistake>& mistakes, const std::string& name, Select select) {
  const auto add = [&](const char* what, auto spoil) {
    mistakes.push_back({name + ": " + what, [select, spoil](auto& tensors) { spoil(select(tensors)); }});
  };
  add("null pointer", [](auto& view) { view.data = nullptr; });
  add("misaligned",
      [](auto& view) { view.data = const_cast<std::byte*>(static_cast<const std::byte*>(view.data)) + 1; });
  add("a row more", [](auto& view) { view.shape[0] += 1; });
  add("a row less", [](auto& view) { view.shape[0] -= 1; });
  add("negative rows", [](auto& view) { view.shape[0] = -1; });
  add("absurdly many rows", [](auto& view) { view.shape[0] = std::numeric_limits<std::int64_t>::max(); });
  add("absurdly wide", [](auto& view) { view.shape[1] = std::numeric_limits<std::int64_t>::max(); });
  add("one dimension", [](auto& view) { view.num_dims = 1; });
  add("seven dimensions", [](auto& view) { view.num_dims = 7; });
  add("unknown dtype", [](auto& view) { view.dtype = static_cast<DType>(99); });
}

template <typename Mistake>
void add_wait_times_mistakes(std::vector<Mistake>& mistakes) {
  const auto add = [&mistakes](const char* what, auto make_view) {
    mistakes.push_back({std::string("wait times ") + what, [make_view](auto& tensors) {
                          tensors.options.wait_times_ns = make_view(static_cast<std::byte*>(tensors.out.x.data));
                        }});
  };
  add("of i32", [](std::byte* at) { return TensorView(at, DType::kInt32, {kNumRanks}); });
  add("of one rank more", [](std::byte* at) { return TensorView(at, DType::kInt64, {kNumRanks + 1}); });
  add("of ranks by ranks", [](std::byte* at) { return TensorView(at, DType::kInt64, {kNumRanks, kNumRanks}); });
  add("at no address", [](std::byte*) { return TensorView(nullptr, DType::kInt64, {kNumRanks}); });
  add("misaligned", [](std::byte* at) { return TensorView(at + 4, DType::kInt64, {kNumRanks}); });
  add("strided", [](std::byte* at) { return TensorView(at, DType::kInt64, {kNumRanks}, {2}); });
}

/// Mistakes in the call's own arguments, without those that ranks disagree on.
std::vector<DispatchMistake> dispatch_mistakes() {
  using Tensors = LatencyDispatchTensors;
  std::vector<DispatchMistake> all = {
      {"x absent", [](Tensors& t) { t.in.x = {}; }},
      {"x of another dtype", [](Tensors& t) { t.in.x.dtype = DType::kFloat16; }},
      {"rows of 30 bytes", [](Tensors& t) { t.in.x.shape[1] = t.out.x.shape[1] = 15; }},
      {"rows of 0 bytes", [](Tensors& t) { t.in.x.shape[1] = t.out.x.shape[1] = 0; }},
      {"x with inner stride 2", [](Tensors& t) { t.in.x.strides[1] = 2; }},
      {"x with overlapping rows", [](Tensors& t) { t.in.x.strides[0] = 8; }},
      {"count of i64",
       [](Tensors& t) { t.in.num_tokens_view = ConstTensorView(t.in.topk_idx.data, DType::kInt64, {1}); }},
      {"two counts",
       [](Tensors& t) { t.in.num_tokens_view = ConstTensorView(t.in.topk_idx.data, DType::kInt32, {2}); }},
      {"count at no address", [](Tensors& t) { t.in.num_tokens_view = ConstTensorView(nullptr, DType::kInt32, {1}); }},
      {"output absent", [](Tensors& t) { t.out.x = {}; }},
      {"output with a row stride of 34 bytes", [](Tensors& t) { t.out.x.strides[0] = 17; }},
      {"output as slabs of another size",
       [](Tensors& t) {
         t.out.x = TensorView(t.out.x.data, t.out.x.dtype, {t.out.x.extent(0) + 1, 1, t.out.x.extent(1)});
       }},
      {"output scales absent", [](Tensors& t) { t.out.scales = {}; }},
      {"input scales absent", [](Tensors& t) { t.in.scales = {}; }},
      {"fewer scales", [](Tensors& t) { t.in.scales.shape[1] = 2; }},
      {"scales of f16", [](Tensors& t) { t.in.scales.dtype = t.out.scales.dtype = DType::kFloat16; }},
      {"overlapping output scales", [](Tensors& t) { t.out.scales.strides[0] = 0; }},
      {"output scales of experts that overlap",
       [](Tensors& t) {
         const std::int64_t capacity = t.options.slab_capacity;
         t.out.scales = TensorView(t.out.scales.data, DType::kFloat32, {t.out.x.extent(0) / capacity, capacity, 3},
                                   {3 * capacity - 1, 3, 1});
       }},
      // The same number of rows, but kernels would address rows that do not exist.
      {"output scales of C experts with L rows",
       [](Tensors& t) {
         const std::int64_t capacity = t.options.slab_capacity;
         t.out.scales = TensorView(t.out.scales.data, DType::kFloat32, {capacity, t.out.x.extent(0) / capacity, 3});
       }},
      {"output x of C experts with L rows",
       [](Tensors& t) {
         const std::int64_t capacity = t.options.slab_capacity;
         t.out.x = TensorView(t.out.x.data, t.out.x.dtype, {capacity, t.out.x.extent(0) / capacity, t.out.x.extent(1)});
       }},
      {"quantised scales given", [](Tensors& t) { t.options.quantize = Quantization::kFp8; }},
      {"quantisation 99", [](Tensors& t) { t.options.quantize = static_cast<Quantization>(99); }},
      {"ids absent", [](Tensors& t) { t.in.topk_idx = {}; }},
      {"ids strided", [](Tensors& t) { t.in.topk_idx.strides[1] = 2; }},
      {"ids f32", [](Tensors& t) { t.in.topk_idx.dtype = DType::kFloat32; }},
      {"ids of another T", [](Tensors& t) { t.in.topk_idx.shape[0] -= 1; }},
      {"K 0", [](Tensors& t) { t.in.topk_idx.shape[1] = 0; }},
      {"K 33", [](Tensors& t) { t.in.topk_idx.shape[1] = 33; }},
      {"weights f16", [](Tensors& t) { t.in.topk_weights.dtype = DType::kFloat16; }},
      {"weights strided", [](Tensors& t) { t.in.topk_weights.strides[0] = 9; }},
      {"E 0", [](Tensors& t) { t.options.num_experts = 0; }},
      {"E negative", [](Tensors& t) { t.options.num_experts = -1; }},
      {"E absurd", [](Tensors& t) { t.options.num_experts = std::int64_t{1} << 60; }},
      {"max_tokens 0", [](Tensors& t) { t.options.max_tokens = 0; }},
      {"max_tokens negative", [](Tensors& t) { t.options.max_tokens = -5; }},
      {"capacity 0", [](Tensors& t) { t.options.slab_capacity = 0; }},
      {"capacity negative", [](Tensors& t) { t.options.slab_capacity = -1; }},
      {"capacity absurd", [](Tensors& t) { t.options.slab_capacity = std::numeric_limits<std::int64_t>::max(); }},
      {"placement too short",
       [](Tensors& t) {
         t.options.expert_to_rank = {0, 1};
       }},
      {"placement on no rank", [](Tensors& t) { t.options.expert_to_rank = {0, 0, 1, 1, 2, kNumRanks}; }},
      {"output over the input", [](Tensors& t) { t.out.x.data = const_cast<void*>(t.in.x.data); }},
      {"output scales over the output", [](Tensors& t) { t.out.scales.data = t.out.x.data; }},
  };
  add_view_mistakes(all, "x", [](Tensors& t) -> ConstTensorView& { return t.in.x; });
  add_view_mistakes(all, "scales", [](Tensors& t) -> ConstTensorView& { return t.in.scales; });
  add_view_mistakes(all, "weights", [](Tensors& t) -> ConstTensorView& { return t.in.topk_weights; });
  add_view_mistakes(all, "output x", [](Tensors& t) -> TensorView& { return t.out.x; });
  add_view_mistakes(all, "output scales", [](Tensors& t) -> TensorView& { return t.out.scales; });
  add_wait_times_mistakes(all);
  return all;
}

std::vector<CombineMistake> combine_mistakes() {
  using Tensors = LatencyCombineTensors;
  std::vector<CombineMistake> all = {
      {"x absent", [](Tensors& t) { t.in.x = {}; }},
      {"x of f16", [](Tensors& t) { t.in.x.dtype = t.out.x.dtype = DType::kFloat16; }},
      {"output of another dtype", [](Tensors& t) { t.out.x.dtype = DType::kFloat32; }},
      {"output absent", [](Tensors& t) { t.out.x = {}; }},
      {"weights of the wrong shape",
       [](Tensors& t) {
         t.in.topk_weights = ConstTensorView(t.in.x.data, DType::kFloat32, {1, 1});
       }},
      {"weights strided", [](Tensors& t) { t.in.topk_weights.strides[0] += 1; }},
      {"order 9", [](Tensors& t) { t.options.order = static_cast<CombineOrder>(9); }},
      {"sums over the input", [](Tensors& t) { t.out.x.data = const_cast<void*>(t.in.x.data); }},
  };
  add_view_mistakes(all, "x", [](Tensors& t) -> ConstTensorView& { return t.in.x; });
  add_view_mistakes(all, "weights", [](Tensors& t) -> ConstTensorView& { return t.in.topk_weights; });
  add_view_mistakes(all, "output x", [](Tensors& t) -> TensorView& { return t.out.x; });
  add_wait_times_mistakes(all);
  return all;
}

/// An option that ranks must agree on: the text of the message, and the change made on rank 1.
struct Disagreement {
  std::string_view words;
  std::function<void(LatencyDispatchTensors&)> differ;
};

class LatencyBadInput : public LatencyConformance {
 protected:
  PreparedCase good_case() {
    ExchangeCase spec;
    spec.name = "good case";
    spec.world = {.num_ranks = kNumRanks, .num_topk = 2, .num_experts = 6, .max_tokens = 4, .layout = Layout::kSlab};
    spec.world.spare_slab_rows = 1;
    spec.dispatches = {{.dtype = DType::kBfloat16, .hidden = 16, .num_scales = 3}};
    spec.combines = {{.hidden = 16, .weighted = true, .own_weights = true},
                     {.hidden = 16, .weighted = true, .order = CombineOrder::kRankSums}};
    return prepare_latency(spec);
  }

  /// Ranks that split their calls: none, all, all but the bad one, or the bad one alone.
  static bool splits(std::size_t mode, bool bad) { return mode % 4 == 1 || mode % 4 == (bad ? 3 : 2); }
};

TEST_P(LatencyBadInput, Dispatch) {
  const std::vector<DispatchMistake> mistakes = dispatch_mistakes();
  const PreparedCase good = good_case();
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    for (const int bad_rank : {0, kNumRanks - 1}) {
      for (std::size_t i = 0; i < mistakes.size(); ++i) {
        LatencyDispatchTensors tensors(context, group, good, 0);
        tensors.options.split = splits(i + static_cast<std::size_t>(bad_rank) / 2, context.rank() == bad_rank);
        if (context.rank() == bad_rank) mistakes[i].spoil(tensors);
        const Status status = call_dispatch(group, tensors);
        expect_same_refusal(context, status, ErrorCode::kInvalidArgument, mistakes[i].name,
                            fmt::format("rank {}: latency_dispatch: ", bad_rank));
        tensors.expect_untouched(context, mistakes[i].name + ": ");
      }
      check_latency_case(context, group, good, Halves::kSplit);
    }
  });
}

TEST_P(LatencyBadInput, Ids) {
  using BadIds = std::pair<std::string, std::vector<std::int64_t>>;
  const std::vector<BadIds> mistakes = {
      {"id E", {0, 6, 0, 0, 0, 0, 0, 0}},
      {"id -2", {0, 0, 0, 0, 0, 0, 0, -2}},
      {"smallest id", std::vector<std::int64_t>(8, std::numeric_limits<std::int64_t>::min())},
      {"id 2^32", std::vector<std::int64_t>(8, std::int64_t{1} << 32)},
  };
  const PreparedCase good = good_case();
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    for (std::size_t mode = 0; mode < 4; ++mode) {
      const int bad_rank = mode % 2 == 0 ? 0 : kNumRanks - 1;
      for (const auto& [name, ids] : mistakes) {
        PlainMemory bad_ids(uses_device(group), ids);
        LatencyDispatchTensors tensors(context, group, good, 0);
        tensors.options.split = splits(mode, context.rank() == bad_rank);
        if (context.rank() == bad_rank) tensors.in.topk_idx.data = bad_ids.data();
        const Status status = call_dispatch(group, tensors);
        expect_same_refusal(context, status, ErrorCode::kInvalidArgument, name, fmt::format("rank {}", bad_rank));
        tensors.expect_untouched(context, name + ": ");
      }
      check_latency_case(context, group, good, Halves::kTogether);
    }
  });
}

TEST_P(LatencyBadInput, Combine) {
  const std::vector<CombineMistake> mistakes = combine_mistakes();
  const PreparedCase good = good_case();
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    LatencyExchange exchange(context, group, good);
    if (!exchange.dispatch()) return;
    for (const int bad_rank : {0, kNumRanks - 1}) {
      for (std::size_t i = 0; i < mistakes.size(); ++i) {
        LatencyCombineTensors tensors(context, group, good, 0);
        tensors.options.split = splits(i + static_cast<std::size_t>(bad_rank) / 2, context.rank() == bad_rank);
        if (context.rank() == bad_rank) mistakes[i].spoil(tensors);
        const Status status = call_combine(group, exchange.routing(), tensors);
        expect_same_refusal(context, status, ErrorCode::kInvalidArgument, mistakes[i].name,
                            fmt::format("rank {}: latency_combine: ", bad_rank));
        tensors.expect_untouched(context, mistakes[i].name + ": ");
      }
      if (!exchange.combine(0) || !exchange.send_combine(1) || !exchange.receive()) return;
    }
  });
}

TEST_P(LatencyBadInput, DispatchesThatRanksDoNotAgreeOn) {
  using Tensors = LatencyDispatchTensors;
  const PreparedCase good = good_case();
  // Gives a group of GPUs room for rank 1's call; it would be refused for lack of room otherwise.
  ExchangeCase roomy = good.spec;
  roomy.spare_max_tokens = 76;
  prepare_latency(roomy);
  // A slab of another capacity fits into any memory that is large enough.
  const std::vector<Disagreement> disagreements = {
      {"num_experts: rank 0 has 6, rank 1 has 7",
       [](Tensors& t) {
         t.options.num_experts = 7;
         t.options.expert_to_rank = {0, 0, 1, 1, 2, 2, 2};
       }},
      {"num_topk: rank 0 has 2, rank 1 has 1",
       [](Tensors& t) {
         t.in.topk_idx.shape[1] = t.in.topk_idx.strides[0] = 1;
         t.in.topk_weights.shape[1] = t.in.topk_weights.strides[0] = 1;
       }},
      {"max_tokens: rank 0 has 4, rank 1 has 80", [](Tensors& t) { t.options.max_tokens = 80; }},
      {"slab_capacity: rank 0 has",
       [](Tensors& t) {
         t.options.slab_capacity /= 2;
         t.out.x.shape[0] = t.out.scales.shape[0] = 2 * t.options.slab_capacity;
       }},
      {"presence of topk_weights: rank 0 has 1, rank 1 has 0", [](Tensors& t) { t.in.topk_weights = {}; }},
      {"row bytes of x: rank 0 has 32, rank 1 has 16", [](Tensors& t) { t.in.x.shape[1] = t.out.x.shape[1] = 8; }},
      {"dtype of x", [](Tensors& t) { t.in.x.dtype = t.out.x.dtype = DType::kFloat16; }},
      {"number of scales per row: rank 0 has 3, rank 1 has 2",
       [](Tensors& t) { t.in.scales.shape[1] = t.out.scales.shape[1] = 2; }},
      {"number of scales per row: rank 0 has 3, rank 1 has 0", [](Tensors& t) { t.in.scales = t.out.scales = {}; }},
      {"dtype of scales", [](Tensors& t) { t.in.scales.dtype = t.out.scales.dtype = DType::kInt32; }},
      {"quantize: rank 0 has kNone, rank 1 has kFp8",
       [](Tensors& t) {
         t.options.quantize = Quantization::kFp8;
         t.in.scales = {};
         t.out.x.dtype = DType::kFloat8E4M3;
         t.out.scales.shape[1] = 1;
       }},
      {"expert_to_rank[0]: rank 0 has 0, rank 1 has 2",
       [](Tensors& t) { t.options.expert_to_rank = {2, 2, 1, 1, 0, 0}; }},
  };
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    for (std::size_t i = 0; i < disagreements.size(); ++i) {
      for (const bool rotate : {false, true}) {
        const std::string what = fmt::format("ranks disagree on {}", disagreements[i].words);
        LatencyDispatchTensors tensors(context, group, good, 0);
        tensors.options.split = splits(i + (rotate ? 1 : 0), context.rank() == 1);
        if (context.rank() == 1) disagreements[i].differ(tensors);
        const Status status = call_dispatch(group, tensors);
        expect_same_refusal(context, status, ErrorCode::kInvalidArgument, what, "latency_dispatch: " + what);
        tensors.expect_untouched(context, what + ": ");
      }
    }
    check_latency_case(context, group, good, Halves::kSplit);
  });
}

TEST_P(LatencyBadInput, WhatMayDifferBetweenRanks) {
  const PreparedCase kept = good_case();
  ExchangeCase spec = kept.spec;
  spec.dispatches[0].zero_padding = true;
  const PreparedCase cleared = prepare_latency(spec);  // the same rows
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    for (int round = 0; round < 2; ++round) {
      const bool odd = (context.rank() + round) % 2 == 1;
      LatencyDispatchTensors tensors(context, group, odd ? cleared : kept, 0);
      tensors.options.split = odd;
      tensors.options.kernel.num_sms = 1 + context.rank();
      if (!context.expect_ok(call_dispatch(group, tensors), "dispatch")) return;
      tensors.expect_received(context, odd ? "where padding is cleared: " : "where padding stays: ");
    }
  });
}

TEST_P(LatencyBadInput, CombinesThatRanksDoNotAgreeOn) {
  struct CombineDisagreement {
    std::string_view words;
    std::function<void(LatencyCombineTensors&)> differ;
  };
  using Tensors = LatencyCombineTensors;
  const std::vector<CombineDisagreement> disagreements = {
      {"row bytes of x: rank 0 has 32, rank 1 has 16", [](Tensors& t) { t.in.x.shape[1] = t.out.x.shape[1] = 8; }},
      {"order: rank 0 has 0, rank 1 has 1", [](Tensors& t) { t.options.order = CombineOrder::kRankSums; }},
      {"presence of topk_weights: rank 0 has 1, rank 1 has 0", [](Tensors& t) { t.in.topk_weights = {}; }},
      {"dtype of x",
       [](Tensors& t) {
         t.in.x.dtype = t.out.x.dtype = DType::kFloat32;
         t.in.x.shape[1] = t.out.x.shape[1] = 8;
         t.in.x.strides[0] = t.out.x.strides[0] = 8;
       }},
  };
  const PreparedCase good = good_case();
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    LatencyExchange exchange(context, group, good);
    LatencyExchange other(context, group, good);
    if (!exchange.dispatch() || !other.dispatch()) return;
    for (std::size_t mode = 0; mode < 4; ++mode) {
      for (const CombineDisagreement& disagreement : disagreements) {
        const std::string what = fmt::format("ranks disagree on {}", disagreement.words);
        LatencyCombineTensors tensors(context, group, good, 0);
        tensors.options.split = splits(mode, context.rank() == 1);
        if (context.rank() == 1) disagreement.differ(tensors);
        const Status status = call_combine(group, exchange.routing(), tensors);
        expect_same_refusal(context, status, ErrorCode::kInvalidArgument, what, "latency_combine: " + what);
        tensors.expect_untouched(context, what + ": ");
      }
      LatencyCombineTensors tensors(context, group, good, 0);
      tensors.options.split = splits(mode, context.rank() == 1);
      const Routing& routing = context.rank() == 1 ? other.routing() : exchange.routing();
      expect_same_refusal(context, call_combine(group, routing, tensors), ErrorCode::kInvalidArgument,
                          "Routings of different dispatches", "ranks disagree on routing");
    }
    if (exchange.combine(0)) other.combine(1);
  });
}

TEST_P(LatencyBadInput, MoreTokensThanMaxTokens) {
  const PreparedCase good = good_case();
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    for (std::size_t mode = 0; mode < 4; ++mode) {
      LatencyDispatchTensors tensors(context, group, good, 0);
      tensors.options.split = splits(mode, context.rank() == 1);
      tensors.options.max_tokens = 3;
      // Ranks 0 and 2 have fewer tokens in this call.
      if (context.rank() != 1) {
        tensors.in.x.shape[0] = tensors.in.topk_idx.shape[0] = tensors.in.topk_weights.shape[0] = 3;
        tensors.in.scales.shape[0] = 3;
      }
      expect_same_refusal(context, call_dispatch(group, tensors), ErrorCode::kCapacity, "4 tokens",
                          "rank 1: latency_dispatch: topk_idx is [4, 2] i64: 4 tokens, expected at most max_tokens, "
                          "which is 3");
      tensors.expect_untouched(context, "4 tokens: ");
    }
    check_latency_case(context, group, good, Halves::kTogether);
  });
}

/// One row too few for one expert. The message names the first rank, expert and number of rows that do not fit.
TEST_P(LatencyBadInput, ASlabThatIsTooSmall) {
  for (const RoutingPattern pattern : {RoutingPattern::kRandom, RoutingPattern::kOneHot, RoutingPattern::kDuplicates}) {
    ExchangeCase spec = good_case().spec;
    spec.world.pattern = pattern;
    spec.world.spare_slab_rows = 0;
    const PreparedCase full = prepare_latency(spec);
    const std::int64_t capacity = full.world.options.slab_capacity - 1;
    ASSERT_GE(capacity, 1);
    std::string words;
    for (int rank = 0; rank < kNumRanks && words.empty(); ++rank) {
      const auto& routing = full.routings[static_cast<std::size_t>(rank)];
      for (std::size_t local = 0; local < routing.local_expert_ids.size() && words.empty(); ++local) {
        if (routing.num_rows_per_local_expert[local] <= capacity) continue;
        words = fmt::format("latency_dispatch: rank {} would receive {} rows for expert {} but slab_capacity is {}",
                            rank, routing.num_rows_per_local_expert[local], routing.local_expert_ids[local], capacity);
      }
    }
    run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
      for (std::size_t mode = 0; mode < 8; ++mode) {
        LatencyDispatchTensors tensors(context, group, full, 0);
        tensors.options.split = splits(mode % 4, context.rank() == 1);
        // Without it such calls have kernels of their own on GPUs.
        tensors.options.zero_padding = mode >= 4;
        tensors.options.slab_capacity = capacity;
        const std::int64_t num_rows = tensors.out.x.extent(0) / (capacity + 1) * capacity;
        tensors.out.x.shape[0] = tensors.out.scales.shape[0] = num_rows;
        expect_same_refusal(context, call_dispatch(group, tensors), ErrorCode::kCapacity, "one row too few", words);
        tensors.expect_untouched(context, "one row too few: ");
        check_latency_case(context, group, full, Halves::kSplit);
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, LatencyBadInput, ::testing::ValuesIn(backend_configs()), config_name);

}  // namespace
}  // namespace ferry::test
