#include "fault/small_latency_exchange.hpp"

#include "common/bfloat16.hpp"
#include "plan/to_size.hpp"

namespace ferry::test {
namespace {

using tools::bfloat16_from_float;

float value_of(const Group& group, std::int64_t at) { return static_cast<float>((at + group.rank()) % 8); }

}  // namespace

SmallLatencyExchange::SmallLatencyExchange(Group& group, bool symmetric)
    : group_(group),
      symmetric_(symmetric),
      // Two experts on every rank, so that each has half of a slab.
      num_experts_(2 * group.num_ranks()),
      capacity_(group.num_ranks() * kNumTokens),
      num_rows_(2 * capacity_),
      weights_(to_size(kNumTokens * kNumTopk), 1.0F),
      out_(to_size(kNumTokens * kHidden)) {
  for (std::int64_t i = 0; i < kNumTokens * kNumTopk; ++i) {
    ids_.push_back((i * 7 + i / kNumTopk + group.rank()) % num_experts_);
  }
  std::uint16_t* const tokens = take(kNumTokens);
  for (std::int64_t i = 0; i < kNumTokens * kHidden; ++i) tokens[i] = bfloat16_from_float(value_of(group, i));
  received_ = take(num_rows_);
  x = tokens;
  y = received_;
}

std::uint16_t* SmallLatencyExchange::take(std::int64_t num_rows) {
  if (symmetric_) {
    buffers_.push_back(group_.allocate(to_size(num_rows * kRowBytes)).value());
    return static_cast<std::uint16_t*>(buffers_.back().data());
  }
  return vectors_.emplace_back(to_size(num_rows * kHidden)).data();
}

TensorView SmallLatencyExchange::slab(const void* data) const {
  return TensorView(const_cast<void*>(data), DType::kBfloat16, {2, capacity_, kHidden});
}

Status SmallLatencyExchange::send_dispatch() {
  LatencyDispatchInput in;
  in.x = ConstTensorView(x, DType::kBfloat16, {kNumTokens, kHidden});
  in.topk_idx = ConstTensorView(ids_.data(), DType::kInt64, {kNumTokens, kNumTopk});
  in.topk_weights = ConstTensorView(weights_.data(), DType::kFloat32, {kNumTokens, kNumTopk});
  LatencyDispatchOutput out;
  out.x = slab(received_);
  LatencyDispatchOptions options;
  options.num_experts = num_experts_;
  options.max_tokens = kNumTokens;
  options.slab_capacity = capacity_;
  options.split = true;
  Result<Routing> sent = group_.latency_dispatch(in, out, options);
  if (sent.ok()) routing_ = *sent;
  return sent.status();
}

Status SmallLatencyExchange::send_combine() {
  LatencyCombineInput in;
  in.x = slab(y);
  LatencyCombineOutput out;
  out.x = TensorView(out_.data(), DType::kBfloat16, {kNumTokens, kHidden});
  return group_.latency_combine(routing_, in, out, {}, {.order = CombineOrder::kRankSums, .split = true});
}

Status SmallLatencyExchange::run_and_verify(int masked) {
  if (Status status = send_dispatch(); !status.ok()) return status;
  if (Status status = receive(); !status.ok()) return status;
  if (Status status = send_combine(); !status.ok()) return status;
  if (Status status = receive(); !status.ok()) return status;
  for (std::int64_t i = 0; i < kNumTokens * kHidden; ++i) {
    int num_picks = 0;
    for (std::int64_t k = 0; k < kNumTopk; ++k) {
      num_picks += static_cast<int>(ids_[to_size(i / kHidden * kNumTopk + k)] / 2 != masked);
    }
    if (out_[to_size(i)] != bfloat16_from_float(value_of(group_, i) * static_cast<float>(num_picks))) {
      return Status(ErrorCode::kInternal, "the combined rows are wrong");
    }
  }
  return {};
}

}  // namespace ferry::test
