#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#include "bench/fp8_sums.hpp"
#include "bench/operations.hpp"
#include "bench/wrong_result.hpp"
#include "common/bfloat16.hpp"
#include "ferry/fp8.hpp"
#include "ferry/int8.hpp"

/// Checks that Operations makes before anything is timed.

namespace ferry::tools {

namespace {

constexpr std::int64_t kSourceColumns = 2;

Status quantize_row(Quantization quantize, const ConstTensorView& x, const TensorView& q, const TensorView& scales) {
  switch (quantize) {
    case Quantization::kFp8:
      return quantize_fp8(x, q, scales);
    case Quantization::kFp8PowerOfTwo:
      return quantize_fp8(x, q, scales, Fp8ScaleFormat::kPowerOfTwo);
    case Quantization::kFp8Ue8m0:
      return quantize_fp8(x, q, scales, Fp8ScaleFormat::kUe8m0);
    case Quantization::kInt8:
      return quantize_int8(x, q, scales);
    case Quantization::kNone:
      break;
  }
  return {};
}

}  // namespace

Result<std::vector<std::int32_t>> Operations::read_source() const {
  const ConstTensorView source = checked_routing().source();
  std::vector<std::int32_t> host(static_cast<std::size_t>(source.num_elements()));
  if (Status status = device_.copy(host.data(), source.data, host.size() * sizeof(std::int32_t)); !status) {
    return status;
  }
  return host;
}

Status Operations::check() {
  const std::int64_t num_rows_out = count_rows_to_other_nodes(
      table_.topk_idx, {plan_.num_ranks, plan_.ranks_per_node(), plan_.num_experts, plan_.num_topk}, context_.rank());
  const bool latency = plan_.latency();
  if (plan_.needs_dispatch_buffers()) {
    Status status = metered(&wire_.dispatch, num_rows_out * plan_.dispatch_wire_row_bytes(),
                            latency ? &Operations::latency_dispatch : &Operations::dispatch);
    if (status) status = wait();
    if (status) status = check_dispatch();
    if (!status) return status;
  }
  if (!plan_.measures_combine()) return {};
  if (Status status = fill_combine_input(); !status) return status;
  Status status = metered(&wire_.combine, num_rows_out * plan_.combine_wire_row_bytes(),
                          latency ? &Operations::latency_combine : &Operations::combine);
  if (!status) return status;
  if (status = wait(); !status) return status;
  return check_combine();
}

/// An expected row; valid until the next one is requested.
struct Operations::ExpectedRow {
  const std::byte* payload = nullptr;
  const std::byte* scales = nullptr;
};

std::function<Operations::ExpectedRow(int, std::int64_t)> Operations::expected_rows() const {
  if (plan_.quantize == Quantization::kNone) {
    return [this](int rank, std::int64_t token) -> ExpectedRow {
      const std::byte* const bytes = pattern_.row(rank, token);
      return {bytes, bytes};
    };
  }
  auto row = std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(plan_.payload_bytes()));
  auto scales = std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(plan_.scale_bytes()));
  return [this, row, scales](int rank, std::int64_t token) -> ExpectedRow {
    const ConstTensorView x(pattern_.row(rank, token), DType::kBfloat16, {1, plan_.hidden});
    const TensorView q(row->data(), plan_.received_dtype(), {1, plan_.hidden});
    const TensorView s(scales->data(), plan_.scale_dtype(), {1, plan_.num_scales()});
    throw_if_error(quantize_row(plan_.quantize, x, q, s));  // cannot fail: this file has chosen the shapes
    return {row->data(), scales->data()};
  };
}

Status Operations::check_dispatch() {
  auto source = read_source();
  if (!source) return source.status();
  const auto expected = expected_rows();
  const std::int64_t row_bytes = plan_.payload_bytes();
  std::int64_t num_rows = 0;
  const auto check_row = [&](std::int64_t row, const std::byte* got) -> Status {
    const std::int32_t* from = source->data() + row * kSourceColumns;
    if (from[0] < 0) return {};
    ++num_rows;
    const ExpectedRow row_of_source = expected(from[0], from[1]);
    if (std::memcmp(got, row_of_source.payload, static_cast<std::size_t>(row_bytes)) == 0) return {};
    return wrong_result(fmt::format("dispatch: row {} is not what rank {} sent as token {}", row, from[0], from[1]));
  };
  Status status = read_rows(device_, {buffers_.received, checked_routing().num_used_rows(), row_bytes}, check_row);
  if (!status) return status;
  if (num_rows != rows().num_received) {
    return wrong_result(
        fmt::format("dispatch: {} rows hold tokens, route announced {}", num_rows, rows().num_received));
  }
  return check_scales(*source);
}

Status Operations::check_scales(const std::vector<std::int32_t>& source) {
  const auto expected = expected_rows();
  const std::int64_t row_bytes = plan_.scale_bytes();
  const auto check_row = [&](std::int64_t row, const std::byte* got) -> Status {
    const std::int32_t* from = source.data() + row * kSourceColumns;
    if (from[0] < 0) return {};
    const ExpectedRow row_of_source = expected(from[0], from[1]);
    if (std::memcmp(got, row_of_source.scales, static_cast<std::size_t>(row_bytes)) == 0) return {};
    return wrong_result(
        fmt::format("dispatch: the scales of row {} are not those of rank {}, token {}", row, from[0], from[1]));
  };
  if (row_bytes == 0) return {};
  return read_rows(device_, {buffers_.recv_scales.data(), checked_routing().num_used_rows(), row_bytes}, check_row);
}

/// Fills the input as experts that return their input would.
Status Operations::fill_combine_input() {
  auto source = read_source();
  if (!source) return source.status();
  if (plan_.returns_weights) {
    const std::vector<float> ones(static_cast<std::size_t>(routing_.num_recv_rows() * plan_.num_topk), 1.0F);
    Status status = device_.copy(buffers_.y_weights.data(), ones.data(), ones.size() * sizeof(float));
    if (!status) return status;
  }
  const std::int64_t row_bytes = plan_.combine_row_bytes();
  return write_rows(device_, {buffers_.y.data(), checked_routing().num_used_rows(), row_bytes},
                    [&](std::int64_t row, std::byte* to) {
                      const std::int32_t* from = source->data() + row * kSourceColumns;
                      if (from[0] < 0) return;
                      std::memcpy(to, pattern_.row(from[0], from[1]), static_cast<std::size_t>(row_bytes));
                    });
}

std::vector<float> Operations::factors_by_rank(std::int64_t token) const {
  std::vector<float> factors(static_cast<std::size_t>(plan_.num_ranks), 0.0F);
  for (std::int64_t k = 0; k < plan_.num_topk; ++k) {
    const auto entry = static_cast<std::size_t>(token * plan_.num_topk + k);
    if (table_.topk_idx[entry] < 0) continue;
    const std::int64_t owner = owner_of(table_.topk_idx[entry], plan_.num_experts, plan_.num_ranks);
    float& factor = factors[static_cast<std::size_t>(owner)];
    if (plan_.combine_is_weighted()) {
      factor += table_.topk_weights[entry];
    } else {
      factor = 1.0F;  // kTokens: experts of a rank share a row
    }
  }
  return factors;
}

float Operations::expected_sum(float x, const std::vector<float>& factors) const {
  const auto rounded = [](float value) { return float_from_bfloat16(bfloat16_from_float(value)); };
  const bool rank_sums = plan_.order == CombineOrder::kRankSums;
  const auto ranks_per_node = static_cast<std::size_t>(plan_.ranks_per_node());
  float sum = 0.0F;
  for (std::size_t first = 0; first < factors.size(); first += ranks_per_node) {
    float node_sum = 0.0F;
    for (std::size_t rank = first; rank < first + ranks_per_node; ++rank) {
      node_sum += rank_sums ? rounded(factors[rank] * x) : factors[rank] * x;
    }
    sum += rounded(node_sum);
  }
  return rounded(sum);
}

/// Every row returns unchanged, so a sum of some of a token's rows is the token times a small factor: products and sums
/// of these are exact in f32 in any order, and only these roundings occur: of each rank's sum
/// (CombineOrder::kRankSums), of each node's sum, and of their total.
Status Operations::check_combine() {
  if (plan_.wire_format == WireFormat::kFp8) return check_fp8_combine();
  const auto check_row = [&](std::int64_t token, const std::byte* bytes) -> Status {
    const auto* sent = reinterpret_cast<const std::uint16_t*>(pattern_.row(context_.rank(), token));
    const auto* got = reinterpret_cast<const std::uint16_t*>(bytes);
    const std::vector<float> factors = factors_by_rank(token);
    for (std::int64_t h = 0; h < plan_.hidden; ++h) {
      const float expected = expected_sum(float_from_bfloat16(sent[h]), factors);
      const float value = float_from_bfloat16(got[h]);
      if (!(value == expected)) {
        return wrong_result(
            fmt::format("combine: token {}, channel {}: expected {}, got {}", token, h, expected, value));
      }
    }
    return {};
  };
  Status status = read_rows(device_, {buffers_.out.data(), plan_.num_tokens, plan_.combine_row_bytes()}, check_row);
  return status && plan_.returns_weights ? check_weights() : status;
}

std::vector<std::vector<float>> Operations::weights_by_rank(std::int64_t token) const {
  std::vector<std::pair<std::int64_t, std::int64_t>> entries;  // expert, k: rows ascend by rank and expert
  for (std::int64_t k = 0; k < plan_.num_topk; ++k) {
    const std::int64_t expert = table_.topk_idx[static_cast<std::size_t>(token * plan_.num_topk + k)];
    if (expert >= 0) entries.emplace_back(expert, k);
  }
  std::ranges::sort(entries);
  std::vector<std::vector<float>> weights(static_cast<std::size_t>(plan_.num_ranks));
  for (const auto& [expert, k] : entries) {
    const std::int64_t owner = owner_of(expert, plan_.num_experts, plan_.num_ranks);
    std::vector<float>& of_rank = weights[static_cast<std::size_t>(owner)];
    if (plan_.combine_is_weighted()) {
      of_rank.push_back(table_.topk_weights[static_cast<std::size_t>(token * plan_.num_topk + k)]);
    } else if (of_rank.empty()) {
      of_rank.push_back(1.0F);  // kTokens: experts of a rank share a row
    }
  }
  return weights;
}

Status Operations::check_fp8_combine() {
  Fp8Sums fp8_sums(plan_);
  const auto check_row = [&](std::int64_t token, const std::byte* bytes) -> Status {
    const auto* sent = reinterpret_cast<const std::uint16_t*>(pattern_.row(context_.rank(), token));
    const auto* got = reinterpret_cast<const std::uint16_t*>(bytes);
    const auto sums = fp8_sums.of(sent, weights_by_rank(token));
    if (!sums) return sums.status();
    for (std::size_t h = 0; h < sums->size(); ++h) {
      if (got[h] == bfloat16_from_float((*sums)[h])) continue;
      return wrong_result(fmt::format("combine: token {}, channel {}: expected {}, got {}", token, h, (*sums)[h],
                                      float_from_bfloat16(got[h])));
    }
    return {};
  };
  Status status = read_rows(device_, {buffers_.out.data(), plan_.num_tokens, plan_.combine_row_bytes()}, check_row);
  return status && plan_.returns_weights ? check_weights() : status;
}

/// Every row returned with ones as weights, so that a token's combined weights count its rows.
Status Operations::check_weights() {
  std::vector<float> got(static_cast<std::size_t>(plan_.num_tokens * plan_.num_topk));
  if (Status status = device_.copy(got.data(), buffers_.out_weights.data(), got.size() * sizeof(float)); !status) {
    return status;
  }
  for (std::size_t i = 0; i < got.size(); ++i) {
    const std::vector<float> factors = factors_by_rank(static_cast<std::int64_t>(i) / plan_.num_topk);
    const float expected = std::accumulate(factors.begin(), factors.end(), 0.0F);
    if (!(got[i] == expected)) {
      return wrong_result(fmt::format("combine: entry {} of the weights: expected {}, got {}", i, expected, got[i]));
    }
  }
  return {};
}

}  // namespace ferry::tools
