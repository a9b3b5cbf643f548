#include "support/gating_case.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "ferry/routing.hpp"
#include "numeric/gating.hpp"

namespace ferry::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

std::int64_t draw_between(std::mt19937_64& random, std::int64_t low, std::int64_t high) {
  return low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low + 1));
}

void draw_options(std::mt19937_64& random, GatingCase& one) {
  GatingOptions& options = one.options;
  options.score = static_cast<GatingScore>(random() % 3);
  options.group_score = static_cast<GatingGroupScore>(random() % 2);
  options.overflow = static_cast<GatingOverflow>(random() % 2);
  std::vector<std::int64_t> divisors;
  for (std::int64_t d = 1; d <= one.num_experts; ++d) {
    if (one.num_experts % d == 0) divisors.push_back(d);
  }
  if (random() % 2 == 0) {
    options.num_groups = static_cast<int>(divisors[random() % divisors.size()]);
    options.num_selected_groups = static_cast<int>(draw_between(random, 1, options.num_groups));
  }
  const std::int64_t most = one.num_experts / options.num_groups * options.num_selected_groups;
  options.num_topk = static_cast<int>(draw_between(random, 1, std::min<std::int64_t>(most, kMaxTopk)));
  options.normalize = random() % 2 == 0;
  options.epsilon = random() % 3 == 0 ? 1e-20F : 0.0F;
  options.scale = random() % 2 == 0 ? 2.5F : 1.0F;
  if (random() % 4 == 0) options.noise = 0.5F;
  options.noise_seed = random();
  options.first_token = draw_between(random, 0, std::int64_t{1} << 40);
  if (random() % 3 == 0) options.capacity = draw_between(random, 1, one.num_tokens);
}

float draw_logit(std::mt19937_64& random, int kind) {
  std::normal_distribution<float> normal(0.0F, 3.0F);
  constexpr std::array<float, 6> kSpecial = {kInf, -kInf, 0.0F, -0.0F, 1e30F, -1e30F};
  if (kind == 1) return static_cast<float>(random() % 4) - 1.0F;  // many ties
  if (kind == 2 && random() % 3 == 0) return random() % 3 == 0 ? std::nanf("") : kSpecial[random() % kSpecial.size()];
  return normal(random);
}

/// Values of one token that `choose_by_definition` compares.
struct Token {
  std::vector<float> logits;
  std::vector<float> selection;  ///< NaN: lowest
};

bool better(float a, std::size_t a_idx, float b, std::size_t b_idx) {
  if (std::isnan(a) != std::isnan(b)) return std::isnan(b);
  if (!std::isnan(a) && a != b) return a > b;
  return a_idx < b_idx;
}

float largest_of(const std::vector<float>& values) {
  float largest = -kInf;
  for (float value : values) {
    if (value > largest) largest = value;
  }
  return largest;
}

float sum_of_32(std::array<float, 32> values) {
  for (std::size_t distance : {16U, 8U, 4U, 2U, 1U}) {
    for (std::size_t i = 0; i < distance; ++i) values[i] = values[i] + values[i + distance];
  }
  return values[0];
}

float relative(float logit, float largest) {
  if (std::isnan(logit)) return 0.0F;
  return logit == largest ? 1.0F : numeric::exponential(logit - largest);
}

std::vector<float> softmax(const std::vector<float>& logits) {
  std::vector<float> scores;
  for (float logit : logits) scores.push_back(relative(logit, largest_of(logits)));
  std::array<float, 32> runs{};
  const std::size_t run_length = (logits.size() + 31) / 32;
  for (std::size_t i = 0; i < scores.size(); ++i) runs[i / run_length] += scores[i];
  const float sum = sum_of_32(runs);
  for (float& score : scores) score = sum == 0 ? 0.0F : score / sum;
  return scores;
}

float sigmoid(float logit) {
  if (std::isnan(logit)) return 0.0F;
  const float small = numeric::exponential(-std::fabs(logit));
  const float inverse = 1.0F / (1.0F + small);
  return logit >= 0 ? inverse : small * inverse;
}

std::vector<float> scores_of(const std::vector<float>& logits, GatingScore score) {
  if (score == GatingScore::kSoftmax) return softmax(logits);
  std::vector<float> scores = logits;
  if (score == GatingScore::kSigmoid) std::transform(logits.begin(), logits.end(), scores.begin(), sigmoid);
  return scores;
}

Token read_token(const GatingCase& one, std::int64_t token) {
  Token read;
  const auto first = one.logits.begin() + token * one.num_experts;
  read.logits.assign(first, first + one.num_experts);
  std::vector<float> compared = read.logits;
  for (std::size_t e = 0; e < compared.size() && one.options.noise > 0; ++e) {
    compared[e] = std::fma(
        one.options.noise,
        numeric::unit_noise(one.options.noise_seed, one.options.first_token + token, static_cast<int>(e)), compared[e]);
  }
  const bool group_sums =
      one.options.num_selected_groups < one.options.num_groups && one.options.group_score == GatingGroupScore::kBestTwo;
  const bool by_score = !one.bias.empty() || group_sums;
  read.selection = by_score ? scores_of(compared, one.options.score) : compared;
  for (std::size_t e = 0; e < compared.size(); ++e) {
    if (!one.bias.empty()) read.selection[e] += one.bias[e];
    if (std::isnan(compared[e])) read.selection[e] = std::nanf("");
  }
  return read;
}

std::vector<bool> open_groups(const GatingCase& one, const Token& token, const std::vector<bool>& full) {
  const auto num_groups = static_cast<std::size_t>(one.options.num_groups);
  const std::size_t group_size = token.logits.size() / num_groups;
  struct Group {
    bool any = false;
    float score = 0;
  };
  std::vector<Group> groups(num_groups);
  for (std::size_t g = 0; g < num_groups; ++g) {
    std::vector<std::size_t> members;
    for (std::size_t e = g * group_size; e < (g + 1) * group_size; ++e) {
      if (!full[e]) members.push_back(e);
    }
    std::sort(members.begin(), members.end(),
              [&](std::size_t a, std::size_t b) { return better(token.selection[a], a, token.selection[b], b); });
    groups[g].any = !members.empty();
    const auto score_of = [&](std::size_t place) {
      if (place >= members.size() || std::isnan(token.selection[members[place]])) return -kInf;
      return token.selection[members[place]];
    };
    const bool sums = one.options.group_score == GatingGroupScore::kBestTwo && group_size > 1;
    if (sums) {
      groups[g].any = true;
      groups[g].score = score_of(0) + score_of(1);
    } else if (groups[g].any) {
      groups[g].score = token.selection[members[0]];
    }
  }
  std::vector<std::size_t> order(num_groups);
  for (std::size_t g = 0; g < num_groups; ++g) order[g] = g;
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    if (groups[a].any != groups[b].any) return groups[a].any;
    return better(groups[a].score, a, groups[b].score, b);
  });
  std::vector<bool> open(num_groups, false);
  for (int i = 0; i < one.options.num_selected_groups; ++i) open[order[static_cast<std::size_t>(i)]] = true;
  return open;
}

std::vector<int> choose(const GatingCase& one, const Token& token, const std::vector<bool>& full) {
  const std::vector<bool> open = open_groups(one, token, full);
  const std::size_t group_size = token.logits.size() / open.size();
  std::vector<std::size_t> candidates;
  for (std::size_t e = 0; e < token.logits.size(); ++e) {
    if (open[e / group_size] && !full[e]) candidates.push_back(e);
  }
  std::sort(candidates.begin(), candidates.end(),
            [&](std::size_t a, std::size_t b) { return better(token.selection[a], a, token.selection[b], b); });
  std::vector<int> chosen(static_cast<std::size_t>(one.options.num_topk), -1);
  for (std::size_t k = 0; k < chosen.size() && k < candidates.size(); ++k) chosen[k] = static_cast<int>(candidates[k]);
  return chosen;
}

std::vector<float> weigh(const GatingCase& one, const Token& token, const std::vector<int>& chosen) {
  const GatingOptions& options = one.options;
  const bool of_chosen = options.score == GatingScore::kSoftmaxOfChosen;
  const bool cancels =
      of_chosen || (options.score == GatingScore::kSoftmax && options.normalize && options.epsilon == 0);
  std::vector<float> logits;
  for (int id : chosen) logits.push_back(id < 0 ? -kInf : token.logits[static_cast<std::size_t>(id)]);
  const std::vector<float> scores = cancels ? std::vector<float>() : scores_of(token.logits, options.score);
  std::vector<float> parts(chosen.size(), 0.0F);
  std::array<float, 32> places{};
  for (std::size_t k = 0; k < chosen.size(); ++k) {
    if (chosen[k] >= 0) {
      parts[k] = cancels ? relative(logits[k], largest_of(logits)) : scores[static_cast<std::size_t>(chosen[k])];
    }
    places[k] = parts[k];
  }
  const float sum = sum_of_32(places) + options.epsilon;
  for (float& part : parts) {
    if ((options.normalize || of_chosen) && sum != 0) part = part / sum;
    part = part * options.scale;
  }
  return parts;
}

}  // namespace

std::string GatingCase::name() const {
  return fmt::format(
      "T {} E {} K {} score {} groups {} of {} by {} normalize {} noise {} capacity {} overflow {} bias {} {}",
      num_tokens, num_experts, options.num_topk, static_cast<int>(options.score), options.num_selected_groups,
      options.num_groups, static_cast<int>(options.group_score), options.normalize, options.noise, options.capacity,
      static_cast<int>(options.overflow), !bias.empty(), is_bfloat16 ? "bf16" : "f32");
}

GatingCase draw_gating_case(std::mt19937_64& random, std::int64_t max_experts, std::int64_t max_tokens) {
  constexpr std::array<std::int64_t, 8> kUsual = {8, 60, 64, 128, 160, 256, 384, 512};
  GatingCase one;
  one.num_experts = random() % 2 == 0 ? kUsual[random() % kUsual.size()] : draw_between(random, 1, max_experts);
  one.num_experts = std::min(one.num_experts, max_experts);
  one.num_tokens = draw_between(random, 1, max_tokens);
  one.is_bfloat16 = random() % 3 == 0;
  one.wide_ids = random() % 2 == 0;
  draw_options(random, one);
  const int kind = static_cast<int>(random() % 3);
  for (std::int64_t i = 0; i < one.num_tokens * one.num_experts; ++i) {
    float logit = draw_logit(random, kind);
    const auto high = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(logit) >> 16);
    if (one.is_bfloat16) logit = std::bit_cast<float>(static_cast<std::uint32_t>(high) << 16);
    one.logits.push_back(logit);
    one.narrow.push_back(high);
  }
  std::normal_distribution<float> normal(0.0F, 0.1F);
  for (std::int64_t e = 0; e < one.num_experts && random() % 1000 != 0; ++e) one.bias.push_back(normal(random));
  if (random() % 2 == 0 || static_cast<std::int64_t>(one.bias.size()) != one.num_experts) one.bias.clear();
  return one;
}

GatingResult choose_by_definition(const GatingCase& one) {
  GatingResult result;
  std::vector<std::int64_t> counts(static_cast<std::size_t>(one.num_experts), 0);
  const std::vector<bool> none_full(counts.size(), false);
  for (std::int64_t t = 0; t < one.num_tokens; ++t) {
    const Token token = read_token(one, t);
    std::vector<int> chosen = choose(one, token, none_full);
    std::vector<bool> full(counts.size(), false);
    for (std::size_t e = 0; e < full.size(); ++e)
      full[e] = one.options.capacity > 0 && counts[e] >= one.options.capacity;
    const auto is_full = [&](int id) { return id >= 0 && full[static_cast<std::size_t>(id)]; };
    const bool overflows = std::any_of(chosen.begin(), chosen.end(), is_full);
    const bool rechooses = overflows && one.options.overflow == GatingOverflow::kRechoose;
    if (rechooses) chosen = choose(one, token, full);
    const std::vector<float> weights = weigh(one, token, chosen);
    for (std::size_t k = 0; k < chosen.size(); ++k) {
      const bool dropped = overflows && !rechooses && is_full(chosen[k]);
      const int id = dropped ? -1 : chosen[k];
      result.ids.push_back(id);
      result.weight_bits.push_back(std::bit_cast<std::uint32_t>(dropped ? 0.0F : weights[k]));
      if (id >= 0) ++counts[static_cast<std::size_t>(id)];
    }
  }
  return result;
}

}  // namespace ferry::test
