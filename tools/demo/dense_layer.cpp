#include "demo/dense_layer.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/bfloat16.hpp"

namespace ferry::tools {

namespace {

/// One (token, k) that chose an expert.
struct Entry {
  std::size_t token;
  float weight;
};

/// For each expert, the entries that chose it, in token order.
std::vector<std::vector<Entry>> entries_by_expert(const DenseInput& in) {
  std::vector<std::vector<Entry>> entries(static_cast<std::size_t>(in.shape->num_experts));
  const auto num_topk = static_cast<std::size_t>(in.shape->num_topk());
  for (std::size_t i = 0; i < in.choice->topk_idx.size(); ++i) {
    const std::int64_t expert = in.choice->topk_idx[i];
    if (expert >= 0) entries[static_cast<std::size_t>(expert)].push_back({i / num_topk, in.choice->topk_weights[i]});
  }
  return entries;
}

double error_bound(float dense, float magnitude, int num_topk, bool rounds_by_node) {
  constexpr double kUnit = kBfloat16UnitRoundoff;
  constexpr double kFloatUnit = std::numeric_limits<float>::epsilon() / 2;
  double rounding_before = kUnit * magnitude;
  if (rounds_by_node) rounding_before += kUnit * (magnitude + rounding_before);
  const double rounding_result = kUnit * (std::abs(double{dense}) + rounding_before);
  const double summing = 2.0 * (num_topk + 1) * kFloatUnit * magnitude;
  return rounding_before + rounding_result + summing + double{std::numeric_limits<float>::min()};
}

}  // namespace

DenseOutput compute_dense(const DenseInput& in, const std::function<void(std::int64_t)>& on_expert) {
  const auto hidden = static_cast<std::size_t>(in.shape->hidden);
  DenseOutput out;
  out.sums.resize(in.x.size());
  out.magnitudes.resize(in.x.size());
  std::vector<float> x_rows(Expert::kChunkRows * hidden);
  std::vector<float> y_rows(Expert::kChunkRows * hidden);
  const auto entries = entries_by_expert(in);
  Expert expert(*in.shape);
  for (std::size_t expert_idx = 0; expert_idx < entries.size(); ++expert_idx) {
    on_expert(static_cast<std::int64_t>(expert_idx));
    const std::span<const Entry> all(entries[expert_idx]);
    if (all.empty()) continue;
    expert.load(in.seed, static_cast<std::int64_t>(expert_idx));
    for (std::size_t first = 0; first < all.size(); first += Expert::kChunkRows) {
      const auto chunk = all.subspan(first, std::min(Expert::kChunkRows, all.size() - first));
      for (std::size_t row = 0; row < chunk.size(); ++row) {
        const std::uint16_t* x = &in.x[chunk[row].token * hidden];
        std::transform(x, x + hidden, &x_rows[row * hidden], float_from_bfloat16);
      }
      expert.forward(x_rows.data(), chunk.size(), y_rows.data());
      for (std::size_t row = 0; row < chunk.size(); ++row) {
        float* sums = &out.sums[chunk[row].token * hidden];
        float* magnitudes = &out.magnitudes[chunk[row].token * hidden];
        for (std::size_t h = 0; h < hidden; ++h) {
          const float term = chunk[row].weight * y_rows[row * hidden + h];
          sums[h] += term;
          magnitudes[h] += std::abs(term);
        }
      }
    }
  }
  return out;
}

Comparison compare_with_dense(std::span<const std::uint16_t> got, const DenseOutput& dense, const LayerShape& shape,
                              int num_nodes) {
  Comparison result;
  const auto hidden = static_cast<std::size_t>(shape.hidden);
  for (std::size_t token = 0; token < got.size() / hidden; ++token) {
    double worst_share = -1.0;
    bool bad = false;
    for (std::size_t h = 0; h < hidden; ++h) {
      const std::size_t i = token * hidden + h;
      const double value = float_from_bfloat16(got[i]);
      const double error = std::abs(value - double{dense.sums[i]});
      const double bound = error_bound(dense.sums[i], dense.magnitudes[i], shape.num_topk(), num_nodes > 1);
      const bool element_bad = !(error <= bound);  // also if either is NaN
      const double share = std::isnan(error) ? std::numeric_limits<double>::infinity() : error / bound;
      if (error > result.largest_error) {
        result.largest_error = error;
        result.bound_at_largest_error = bound;
      }
      result.largest_share = std::max(result.largest_share, share);
      if (element_bad && result.num_bad_tokens == 0 && share > worst_share) {
        result.first_bad_token = static_cast<std::int64_t>(token);
        result.first_bad_channel = static_cast<std::int64_t>(h);
        result.expected = dense.sums[i];
        result.got = value;
        result.bound = bound;
      }
      worst_share = std::max(worst_share, share);
      bad = bad || element_bad;
    }
    if (bad) ++result.num_bad_tokens;
  }
  result.verified = result.num_bad_tokens == 0;
  return result;
}

const char* bound_formula(int num_nodes) {
  return num_nodes > 1 ? "B + u*(|D| + B) + 2(K+1)*2^-24*S, B = u*S + u*(S + u*S) (experts' outputs, nodes' sums), u = "
                         "2^-8 (bf16), S = sum |w*y|, D = dense sum"
                       : "u*S + u*(|D| + u*S) + 2(K+1)*2^-24*S, u = 2^-8 (bf16), S = sum |w*y|, D = dense sum";
}

}  // namespace ferry::tools
