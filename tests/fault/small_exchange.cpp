#include "fault/small_exchange.hpp"

#include <algorithm>
#include <set>

#include "common/bfloat16.hpp"
#include "plan/to_size.hpp"

namespace ferry::test {
namespace {

using tools::bfloat16_from_float;

}  // namespace

SmallExchange::SmallExchange(Group& group, bool symmetric)
    : group_(group), symmetric_(symmetric), num_experts_(2 * group.num_ranks() + 1) {
  ids_.resize(to_size(kNumTokens * kNumTopk));
  for (std::int64_t i = 0; i < kNumTokens * kNumTopk; ++i) {
    ids_[to_size(i)] = (i * 7 + i / kNumTopk + group.rank()) % num_experts_;
  }
  x_values_ = take(kNumTokens);
  for (std::int64_t i = 0; i < kNumTokens * kHidden; ++i) {
    x_values_[i] = bfloat16_from_float(static_cast<float>((i + group.rank()) % 8));
  }
  out_.resize(to_size(kNumTokens * kHidden));
  topk_idx = ConstTensorView(ids_.data(), DType::kInt64, {kNumTokens, kNumTopk});
  x = ConstTensorView(x_values_, DType::kBfloat16, {kNumTokens, kHidden});
}

std::uint16_t* SmallExchange::take(std::int64_t num_rows) {
  if (symmetric_) {
    buffers_.push_back(group_.allocate(to_size(std::max<std::int64_t>(num_rows, 1) * kRowBytes)).value());
    return static_cast<std::uint16_t*>(buffers_.back().data());
  }
  return vectors_.emplace_back(to_size(num_rows * kHidden)).data();
}

Status SmallExchange::route() {
  Result<Routing> routing = group_.route({.topk_idx = topk_idx, .topk_weights = {}}, {.num_experts = num_experts_});
  if (!routing.ok()) return routing.status();
  routing_ = *routing;
  received_ = take(routing_.num_recv_rows());
  return {};
}

Status SmallExchange::dispatch() {
  DispatchInput in;
  in.x = x;
  DispatchOutput out;
  out.x = TensorView(received_, DType::kBfloat16, {routing_.num_recv_rows(), kHidden});
  return group_.dispatch(routing_, in, out);
}

Status SmallExchange::combine() {
  CombineInput in;
  in.x = ConstTensorView(received_, DType::kBfloat16, {routing_.num_recv_rows(), kHidden});
  in.bias[0] = bias;
  CombineOutput out;
  out.x = TensorView(out_.data(), DType::kBfloat16, {kNumTokens, kHidden});
  return group_.combine(routing_, in, out);
}

Status SmallExchange::run_and_verify() {
  if (Status status = route(); !status.ok()) return status;
  if (Status status = dispatch(); !status.ok()) return status;
  if (Status status = combine(); !status.ok()) return status;
  for (std::int64_t token = 0; token < kNumTokens; ++token) {
    std::set<std::int64_t> ranks;
    for (std::int64_t topk = 0; topk < kNumTopk; ++topk) {
      const std::int64_t expert = ids_[to_size(token * kNumTopk + topk)];
      ranks.insert(((expert + 1) * group_.num_ranks() - 1) / num_experts_);
    }
    for (std::int64_t h = 0; h < kHidden; ++h) {
      const auto value = static_cast<float>((token * kHidden + h + group_.rank()) % 8);
      if (out_[to_size(token * kHidden + h)] != bfloat16_from_float(value * static_cast<float>(ranks.size()))) {
        return Status(ErrorCode::kInternal, "the combined rows are wrong");
      }
    }
  }
  return {};
}

}  // namespace ferry::test
