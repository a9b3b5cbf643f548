#include "demo/moe_layer.hpp"

#include <algorithm>
#include <cmath>

#include "common/bfloat16.hpp"
#include "common/hash.hpp"

namespace ferry::tools {

namespace {

/// Standard deviation of the router's logits: large enough that the choice is not a coin toss, small enough that every
/// expert gets work.
constexpr float kRouterGain = 1.5F;

enum ExpertPart : std::uint64_t { kGatePart = 0, kUpPart = 1, kDownPart = 2, kNumParts = 3 };

/// Logits of up to this many tokens are held at once.
constexpr std::size_t kGateChunkRows = 256;

}  // namespace

LayerSeeds::LayerSeeds(std::uint64_t seed)
    : embedding(derive_seed(seed, 1)), router(derive_seed(seed, 2)), experts(derive_seed(seed, 3)) {}

Result<Choice> choose_experts(std::span<const std::uint16_t> x, const LayerShape& shape, std::uint64_t seed) {
  const auto hidden = static_cast<std::size_t>(shape.hidden);
  const auto num_experts = static_cast<std::size_t>(shape.num_experts);
  const auto num_topk = static_cast<std::size_t>(shape.num_topk());
  const std::size_t num_tokens = x.size() / hidden;
  Matrix router;
  router.fill(seed, hidden, num_experts, kRouterGain);

  Choice choice;
  choice.topk_idx.resize(num_tokens * num_topk);
  choice.topk_weights.resize(num_tokens * num_topk);
  std::vector<float> rows(kGateChunkRows * hidden);
  std::vector<float> logits(kGateChunkRows * num_experts);
  for (std::size_t first = 0; first < num_tokens; first += kGateChunkRows) {
    const std::size_t num_rows = std::min(kGateChunkRows, num_tokens - first);
    std::transform(&x[first * hidden], &x[first * hidden] + num_rows * hidden, rows.begin(), float_from_bfloat16);
    multiply(rows.data(), num_rows, router, logits.data());
    const auto count = static_cast<std::int64_t>(num_rows);
    const std::int64_t topk = shape.num_topk();
    Status status = select_experts({logits.data(), DType::kFloat32, {count, shape.num_experts}}, {}, shape.gating,
                                   {&choice.topk_idx[first * num_topk], DType::kInt64, {count, topk}},
                                   {&choice.topk_weights[first * num_topk], DType::kFloat32, {count, topk}});
    if (!status) return status;
  }
  return choice;
}

void Expert::load(std::uint64_t seed, std::int64_t expert_idx) {
  const auto hidden = static_cast<std::size_t>(shape_.hidden);
  const auto intermediate = static_cast<std::size_t>(shape_.intermediate);
  const std::uint64_t expert_seed = derive_seed(seed, static_cast<std::uint64_t>(expert_idx));
  gate_.fill(derive_seed(expert_seed, kGatePart), hidden, intermediate, 1.0F);
  up_.fill(derive_seed(expert_seed, kUpPart), hidden, intermediate, 1.0F);
  down_.fill(derive_seed(expert_seed, kDownPart), intermediate, hidden, 1.0F);
}

std::int64_t Expert::num_weights(const LayerShape& shape) {
  const auto hidden = static_cast<std::size_t>(shape.hidden);
  const auto intermediate = static_cast<std::size_t>(shape.intermediate);
  const std::size_t num_values =
      2 * Matrix::num_values(hidden, intermediate) + Matrix::num_values(intermediate, hidden);
  return static_cast<std::int64_t>((num_values + hidden - 1) / hidden * hidden);
}

std::vector<float> Expert::weights() const {
  std::vector<float> weights;
  for (const Matrix* matrix : {&gate_, &up_, &down_}) {
    weights.insert(weights.end(), matrix->values().begin(), matrix->values().end());
  }
  weights.resize(static_cast<std::size_t>(num_weights(shape_)));
  return weights;
}

void Expert::load(std::span<const float> weights) {
  const auto hidden = static_cast<std::size_t>(shape_.hidden);
  const auto intermediate = static_cast<std::size_t>(shape_.intermediate);
  const std::size_t num_in = Matrix::num_values(hidden, intermediate);
  gate_.assign(weights.first(num_in), hidden, intermediate);
  up_.assign(weights.subspan(num_in, num_in), hidden, intermediate);
  down_.assign(weights.subspan(2 * num_in, Matrix::num_values(intermediate, hidden)), intermediate, hidden);
}

void Expert::forward(const float* x, std::size_t num_rows, float* y) {
  const std::size_t num_values = num_rows * static_cast<std::size_t>(shape_.intermediate);
  gate_rows_.resize(num_values);
  up_rows_.resize(num_values);
  multiply(x, num_rows, gate_, gate_rows_.data());
  multiply(x, num_rows, up_, up_rows_.data());
  for (std::size_t i = 0; i < num_values; ++i) {
    const float gate = gate_rows_[i];
    gate_rows_[i] = gate / (1.0F + std::exp(-gate)) * up_rows_[i];
  }
  multiply(gate_rows_.data(), num_rows, down_, y);
}

}  // namespace ferry::tools
