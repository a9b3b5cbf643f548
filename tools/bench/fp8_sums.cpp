#include "bench/fp8_sums.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "common/bfloat16.hpp"
#include "ferry/fp8.hpp"

namespace ferry::tools {

namespace {

void add(std::vector<float>& sums, float weight, const std::vector<float>& values) {
  for (std::size_t h = 0; h < sums.size(); ++h) sums[h] = std::fma(weight, values[h], sums[h]);
}

}  // namespace

Fp8Sums::Fp8Sums(const BenchPlan& plan)
    : plan_(plan),
      x_(static_cast<std::size_t>(plan.hidden)),
      codes_(x_.size()),
      scales_(x_.size() / static_cast<std::size_t>(kQuantBlockSize)) {}

Result<std::span<const float>> Fp8Sums::of(const std::uint16_t* x, const std::vector<std::vector<float>>& weights) {
  std::transform(x, x + x_.size(), x_.begin(), float_from_bfloat16);
  sums_.assign(x_.size(), 0.0F);
  if (Status status = plan_.latency() ? sum_ranks(weights) : sum_rows(weights); !status) return status;
  return std::span<const float>(sums_);
}

Status Fp8Sums::travel() {
  const TensorView values(values_.data(), DType::kFloat32, {1, plan_.hidden});
  const TensorView codes(codes_.data(), DType::kFloat8E4M3, {1, plan_.hidden});
  const TensorView scales(scales_.data(), DType::kFloat32, {1, static_cast<std::int64_t>(scales_.size())});
  Status status = quantize_fp8(values, codes, scales);
  return status ? dequantize_fp8(codes, scales, values) : status;
}

Status Fp8Sums::sum_rows(const std::vector<std::vector<float>>& weights) {
  values_ = x_;
  if (Status status = travel(); !status) return status;
  for (const std::vector<float>& of_rank : weights) {
    for (const float weight : of_rank) add(sums_, weight, values_);
  }
  return {};
}

Status Fp8Sums::sum_ranks(const std::vector<std::vector<float>>& weights) {
  const auto ranks_per_node = static_cast<std::size_t>(plan_.ranks_per_node());
  for (std::size_t first = 0; first < weights.size(); first += ranks_per_node) {
    node_sums_.assign(x_.size(), 0.0F);
    for (std::size_t rank = first; rank < first + ranks_per_node; ++rank) {
      if (weights[rank].empty()) continue;
      values_.assign(x_.size(), 0.0F);
      for (const float weight : weights[rank]) add(values_, weight, x_);
      if (Status status = travel(); !status) return status;
      add(node_sums_, 1.0F, values_);
    }
    for (float& sum : node_sums_) sum = float_from_bfloat16(bfloat16_from_float(sum));
    add(sums_, 1.0F, node_sums_);
  }
  return {};
}

}  // namespace ferry::tools
