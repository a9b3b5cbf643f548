#include "ferry/gating.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace ferry {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Chosen {
  std::vector<std::int64_t> ids;
  std::vector<float> weights;
};

Chosen choose(const std::vector<float>& logits, std::int64_t num_experts, const GatingOptions& options,
              const std::vector<float>& bias = {}) {
  const std::int64_t num_tokens = static_cast<std::int64_t>(logits.size()) / num_experts;
  Chosen chosen;
  chosen.ids.assign(static_cast<std::size_t>(num_tokens * options.num_topk), -7);
  chosen.weights.assign(chosen.ids.size(), -7.0F);
  const Status status =
      select_experts(ConstTensorView(logits.data(), DType::kFloat32, {num_tokens, num_experts}),
                     bias.empty() ? ConstTensorView() : ConstTensorView(bias.data(), DType::kFloat32, {num_experts}),
                     options, TensorView(chosen.ids.data(), DType::kInt64, {num_tokens, options.num_topk}),
                     TensorView(chosen.weights.data(), DType::kFloat32, {num_tokens, options.num_topk}));
  EXPECT_TRUE(status.ok()) << status.to_string();
  return chosen;
}

/// Chooses by the definition: scores in double, groups and experts picked one maximum at a time.
Chosen choose_naively(const std::vector<float>& logits, std::int64_t num_experts, const GatingOptions& options,
                      const std::vector<float>& bias) {
  Chosen chosen;
  const auto experts = static_cast<std::size_t>(num_experts);
  const std::size_t group_size = experts / static_cast<std::size_t>(options.num_groups);
  for (std::size_t token = 0; token < logits.size() / experts; ++token) {
    const float* row = logits.data() + token * experts;
    std::vector<double> scores(experts);
    double total = 0;
    for (std::size_t e = 0; e < experts; ++e) total += std::exp(static_cast<double>(row[e]));
    for (std::size_t e = 0; e < experts; ++e) {
      const double exponential = std::exp(static_cast<double>(row[e]));
      scores[e] = options.score == GatingScore::kSoftmax ? exponential / total : exponential / (1 + exponential);
    }
    const auto selection = [&](std::size_t e) {
      return scores[e] + (bias.empty() ? 0.0 : static_cast<double>(bias[e]));
    };

    std::set<std::size_t> open_groups;
    while (static_cast<int>(open_groups.size()) < options.num_selected_groups) {
      double best_score = -1e300;
      std::size_t best = 0;
      for (std::size_t g = 0; g < static_cast<std::size_t>(options.num_groups); ++g) {
        if (open_groups.count(g) != 0) continue;
        std::vector<double> members;
        for (std::size_t e = g * group_size; e < (g + 1) * group_size; ++e) members.push_back(selection(e));
        std::sort(members.rbegin(), members.rend());
        const double score = members[0] + (members.size() > 1 ? members[1] : 0.0);
        if (score > best_score) best_score = score, best = g;
      }
      open_groups.insert(best);
    }
    std::set<std::size_t> taken;
    double sum = 0;
    std::vector<double> weights;
    for (int k = 0; k < options.num_topk; ++k) {
      double best_score = -1e300;
      std::size_t best = 0;
      for (std::size_t e = 0; e < experts; ++e) {
        if (taken.count(e) != 0 || open_groups.count(e / group_size) == 0) continue;
        if (selection(e) > best_score) best_score = selection(e), best = e;
      }
      taken.insert(best);
      chosen.ids.push_back(static_cast<std::int64_t>(best));
      weights.push_back(scores[best]);
      sum += scores[best];
    }
    for (double weight : weights) {
      const double normalised = options.normalize ? weight / sum : weight;
      chosen.weights.push_back(static_cast<float>(normalised * static_cast<double>(options.scale)));
    }
  }
  return chosen;
}

TEST(Gating, AgreesWithTheDefinitionOnRandomLogits) {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal(0.0F, 2.0F);
  struct Shape {
    std::int64_t num_experts;
    int num_topk, num_groups, num_selected_groups;
  };
  for (const Shape& shape : {Shape{8, 2, 1, 1}, Shape{60, 4, 1, 1}, Shape{256, 8, 8, 4}, Shape{16, 16, 1, 1},
                             Shape{16, 8, 4, 2}, Shape{12, 3, 12, 5}, Shape{1, 1, 1, 1}, Shape{64, 6, 4, 4}}) {
    for (GatingScore score : {GatingScore::kSoftmax, GatingScore::kSigmoid}) {
      for (bool with_bias : {false, true}) {
        GatingOptions options{score, shape.num_topk, shape.num_groups, shape.num_selected_groups, with_bias, 2.5F};
        std::vector<float> logits(static_cast<std::size_t>(20 * shape.num_experts));
        for (float& logit : logits) logit = normal(random);
        std::vector<float> bias(with_bias ? static_cast<std::size_t>(shape.num_experts) : 0);
        for (float& value : bias) value = normal(random) * 0.1F;
        const Chosen got = choose(logits, shape.num_experts, options, bias);
        const Chosen expected = choose_naively(logits, shape.num_experts, options, bias);
        ASSERT_EQ(got.ids, expected.ids) << "E " << shape.num_experts << " K " << shape.num_topk;
        for (std::size_t i = 0; i < got.weights.size(); ++i) ASSERT_NEAR(got.weights[i], expected.weights[i], 2e-5F);
      }
    }
  }
}

TEST(Gating, SoftmaxByHand) {
  const std::vector<float> logits = {std::log(1.0F), std::log(2.0F), std::log(5.0F), 0.0F - kInf};
  GatingOptions options;
  options.num_topk = 2;
  options.normalize = false;
  const Chosen plain = choose(logits, 4, options);
  EXPECT_EQ(plain.ids, (std::vector<std::int64_t>{2, 1}));
  EXPECT_NEAR(plain.weights[0], 0.625F, 1e-6F);
  EXPECT_NEAR(plain.weights[1], 0.25F, 1e-6F);
  options.normalize = true;
  options.scale = 7.0F;
  const Chosen normalised = choose(logits, 4, options);
  EXPECT_NEAR(normalised.weights[0], 5.0F, 1e-5F);
  EXPECT_NEAR(normalised.weights[1], 2.0F, 1e-5F);
}

TEST(Gating, BiasSelectsButDoesNotWeigh) {
  GatingOptions options;
  options.score = GatingScore::kSigmoid;
  options.normalize = false;
  const Chosen chosen = choose({0.0F, 4.0F}, 2, options, {10.0F, 0.0F});
  EXPECT_EQ(chosen.ids[0], 0);
  EXPECT_EQ(chosen.weights[0], 0.5F);
}

TEST(Gating, GroupsAreJudgedByTheirTwoBest) {
  GatingOptions options;
  options.score = GatingScore::kSigmoid;
  options.num_topk = 2;
  options.num_groups = 2;
  // The single best expert is 0, but group 1 has the better pair.
  const Chosen chosen = choose({3.0F, -9.0F, -9.0F, 1.0F, 1.5F, 0.0F}, 6, options);
  EXPECT_EQ(chosen.ids, (std::vector<std::int64_t>{4, 3}));
}

TEST(Gating, GroupsOfOneExpertAreJudgedByIt) {
  GatingOptions options;
  options.num_topk = 2;
  options.num_groups = 4;
  options.num_selected_groups = 2;
  EXPECT_EQ(choose({1.0F, 4.0F, 3.0F, 2.0F}, 4, options).ids, (std::vector<std::int64_t>{1, 2}));
}

TEST(Gating, TiesGoToTheLowerExpertAndGroup) {
  GatingOptions options;
  options.num_topk = 3;
  EXPECT_EQ(choose(std::vector<float>(8, 0.5F), 8, options).ids, (std::vector<std::int64_t>{0, 1, 2}));
  options.num_groups = 4;
  options.num_selected_groups = 2;
  EXPECT_EQ(choose(std::vector<float>(8, 0.5F), 8, options).ids, (std::vector<std::int64_t>{0, 1, 2}));
  EXPECT_EQ(choose({0, 0, 0, 0, 1, 1, 1, 1}, 8, options).ids, (std::vector<std::int64_t>{4, 5, 6}));
}

TEST(Gating, AllExpertsInDescendingOrder) {
  GatingOptions options;
  options.num_topk = 4;
  const Chosen chosen = choose({1.0F, 3.0F, 0.0F, 2.0F}, 4, options);
  EXPECT_EQ(chosen.ids, (std::vector<std::int64_t>{1, 3, 0, 2}));
  EXPECT_NEAR(chosen.weights[0] + chosen.weights[1] + chosen.weights[2] + chosen.weights[3], 1.0F, 1e-6F);
}

TEST(Gating, ExtremeLogitsDoNotOverflow) {
  GatingOptions options;
  options.num_topk = 2;
  const Chosen large = choose({1e30F, 1e30F, -1e30F}, 3, options);
  EXPECT_EQ(large.ids, (std::vector<std::int64_t>{0, 1}));
  EXPECT_EQ(large.weights, (std::vector<float>{0.5F, 0.5F}));
  const Chosen infinite = choose({0.0F, kInf, 1.0F}, 3, options);
  EXPECT_EQ(infinite.ids, (std::vector<std::int64_t>{1, 2})) << "by logit, although both other scores are 0";
  EXPECT_EQ(infinite.weights, (std::vector<float>{1.0F, 0.0F}));
  const Chosen none = choose({-kInf, -kInf, -kInf}, 3, options);
  EXPECT_EQ(none.weights, (std::vector<float>{0.5F, 0.5F}));
  options.score = GatingScore::kSigmoid;
  const Chosen saturated = choose({-1e30F, 1e30F, -kInf}, 3, options);
  EXPECT_EQ(saturated.ids, (std::vector<std::int64_t>{1, 0}));
  EXPECT_EQ(saturated.weights, (std::vector<float>{1.0F, 0.0F}));
  const Chosen vanished = choose({-1e30F, -1e30F}, 2, options);
  EXPECT_EQ(vanished.weights, (std::vector<float>{0.0F, 0.0F})) << "zero scores stay zero when normalised";
}

TEST(Gating, NanIsChosenLastAndIdsStayDistinct) {
  GatingOptions options;
  options.score = GatingScore::kSigmoid;
  options.num_topk = 3;
  const Chosen chosen = choose({std::nanf(""), 1.0F, std::nanf(""), 2.0F}, 4, options);
  EXPECT_EQ(chosen.ids, (std::vector<std::int64_t>{3, 1, 0}));
}

TEST(Gating, NarrowIdsAndStridedOutputs) {
  const std::vector<float> logits = {1.0F, 2.0F, 3.0F, 3.0F, 2.0F, 1.0F};
  std::vector<std::int32_t> ids(8, -7);
  std::vector<float> weights(4, -7.0F);
  GatingOptions options;
  options.num_topk = 2;
  throw_if_error(select_experts(ConstTensorView(logits.data(), DType::kFloat32, {2, 3}), {}, options,
                                TensorView(ids.data(), DType::kInt32, {2, 2}, {4, 1}),
                                TensorView(weights.data(), DType::kFloat32, {2, 2}, {1, 2})));
  EXPECT_EQ(ids, (std::vector<std::int32_t>{2, 1, -7, -7, 0, 1, -7, -7}));
  EXPECT_EQ(weights[0], weights[1]);
  EXPECT_GT(weights[0], weights[2]);
}

TEST(Gating, AtMost32ExpertsAToken) {
  const std::vector<float> logits(64, 0.0F);
  std::vector<std::int64_t> ids(33, -7);
  std::vector<float> weights(33, -7.0F);
  GatingOptions options;
  options.num_topk = 33;
  const Status status = select_experts(ConstTensorView(logits.data(), DType::kFloat32, {1, 64}), {}, options,
                                       TensorView(ids.data(), DType::kInt64, {1, 33}),
                                       TensorView(weights.data(), DType::kFloat32, {1, 33}));
  EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
  EXPECT_NE(status.message().find("num_topk is 33, expected at most 32"), std::string_view::npos) << status.message();
}

TEST(Gating, BadArgumentsAreRefusedAndNothingIsWritten) {
  std::vector<float> logits(2 * 6, 0.0F);
  std::vector<std::int64_t> ids(4, -7);
  std::vector<float> weights(4, -7.0F);
  const ConstTensorView good_logits(logits.data(), DType::kFloat32, {2, 6});
  const TensorView good_ids(ids.data(), DType::kInt64, {2, 2});
  const TensorView good_weights(weights.data(), DType::kFloat32, {2, 2});
  const ConstTensorView no_bias;
  const auto options = [](int num_topk, int num_groups, int num_selected_groups) {
    return GatingOptions{GatingScore::kSoftmax, num_topk, num_groups, num_selected_groups, true, 1.0F};
  };
  GatingOptions bad_score = options(2, 1, 1);
  bad_score.score = static_cast<GatingScore>(9);
  const auto with = [&](auto member, auto value) {
    GatingOptions changed = options(2, 1, 1);
    changed.*member = value;
    return changed;
  };
  struct Case {
    const char* mentions;
    ConstTensorView logits;
    ConstTensorView bias;
    GatingOptions options;
    TensorView ids;
    TensorView weights;
  };
  const std::vector<Case> cases = {
      {"logits is absent", {}, no_bias, options(2, 1, 1), good_ids, good_weights},
      {"logits is f16", ConstTensorView(logits.data(), DType::kFloat16, {2, 6}), no_bias, options(2, 1, 1), good_ids,
       good_weights},
      {"logits is of strides", ConstTensorView(logits.data(), DType::kFloat32, {2, 6}, {1, 2}), no_bias,
       options(2, 1, 1), good_ids, good_weights},
      {"bias is [5]", good_logits, ConstTensorView(logits.data(), DType::kFloat32, {5}), options(2, 1, 1), good_ids,
       good_weights},
      {"bias is a null pointer", good_logits, ConstTensorView(nullptr, DType::kFloat32, {6}), options(2, 1, 1),
       good_ids, good_weights},
      {"options.num_topk is 7", good_logits, no_bias, options(7, 1, 1), good_ids, good_weights},
      {"options.num_topk is 0", good_logits, no_bias, options(0, 1, 1), good_ids, good_weights},
      {"options.num_topk is 3", good_logits, no_bias, options(3, 3, 1), good_ids, good_weights},
      {"options.num_groups is 4", good_logits, no_bias, options(2, 4, 2), good_ids, good_weights},
      {"options.num_groups is 0", good_logits, no_bias, options(2, 0, 0), good_ids, good_weights},
      {"options.num_selected_groups is 4", good_logits, no_bias, options(2, 3, 4), good_ids, good_weights},
      {"options.score is 9", good_logits, no_bias, bad_score, good_ids, good_weights},
      {"options.scale is inf", good_logits, no_bias, with(&GatingOptions::scale, kInf), good_ids, good_weights},
      {"options.epsilon is -1", good_logits, no_bias, with(&GatingOptions::epsilon, -1.0F), good_ids, good_weights},
      {"options.noise is nan", good_logits, no_bias, with(&GatingOptions::noise, std::nanf("")), good_ids,
       good_weights},
      {"options.capacity is -1", good_logits, no_bias, with(&GatingOptions::capacity, -1), good_ids, good_weights},
      {"options.overflow is 2", good_logits, no_bias, with(&GatingOptions::overflow, static_cast<GatingOverflow>(2)),
       good_ids, good_weights},
      {"options.group_score is 2", good_logits, no_bias,
       with(&GatingOptions::group_score, static_cast<GatingGroupScore>(2)), good_ids, good_weights},
      {"topk_idx is [2, 2]", good_logits, no_bias, options(1, 1, 1), good_ids, good_weights},
      {"topk_idx is f32", good_logits, no_bias, options(2, 1, 1), good_weights, good_weights},
      {"topk_weights is i64", good_logits, no_bias, options(2, 1, 1), good_ids, good_ids},
      {"topk_weights is absent", good_logits, no_bias, options(2, 1, 1), good_ids, {}},
      {"topk_idx is a null pointer", good_logits, no_bias, options(2, 1, 1), TensorView(nullptr, DType::kInt64, {2, 2}),
       good_weights},
  };
  for (const Case& bad : cases) {
    const Status status = select_experts(bad.logits, bad.bias, bad.options, bad.ids, bad.weights);
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument) << bad.mentions;
    EXPECT_NE(status.message().find(bad.mentions), std::string_view::npos) << status.message();
  }
  EXPECT_EQ(ids, std::vector<std::int64_t>(4, -7));
  EXPECT_EQ(weights, std::vector<float>(4, -7.0F));
}

}  // namespace
}  // namespace ferry
