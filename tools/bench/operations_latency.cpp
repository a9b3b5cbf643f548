#include <utility>

#include "bench/operations.hpp"
#include "common/timing.hpp"

/// Calls of latency mode, on the same buffers as the others, and their reference calls.

namespace ferry::tools {

LatencyShape Operations::latency_shape() const {
  LatencyShape shape;
  shape.backend = plan_.backend;
  shape.num_ranks = plan_.num_ranks;
  shape.max_tokens = plan_.num_tokens;
  shape.num_topk = plan_.num_topk;
  shape.dispatch_row_bytes = plan_.payload_bytes() + plan_.scale_bytes();
  shape.combine_row_bytes = plan_.combine_row_bytes();
  return shape;
}

Status Operations::latency_dispatch() {
  const std::int64_t num_rows = routing_.num_recv_rows();  // L * C, like every Routing of this run
  LatencyDispatchInput in;
  LatencyDispatchOutput out;
  in.x = {buffers_.x.data(), input_dtype(), {plan_.num_tokens, plan_.hidden}};
  in.topk_idx = route_input().topk_idx;
  if (!plan_.late_weights) in.topk_weights = route_input().topk_weights;
  out.x = {buffers_.received, plan_.received_dtype(), {num_rows, plan_.hidden}};
  if (plan_.input_scale_bytes() > 0) {
    in.scales = {buffers_.scales.data(), plan_.scale_dtype(), {plan_.num_tokens, plan_.num_scales()}};
  }
  if (plan_.num_scales() > 0) {
    out.scales = {buffers_.recv_scales.data(), plan_.scale_dtype(), {num_rows, plan_.num_scales()}};
  }
  LatencyDispatchOptions options;
  options.num_experts = plan_.num_experts;
  options.max_tokens = plan_.num_tokens;
  options.slab_capacity = slab_capacity_;
  options.quantize = plan_.quantize;
  options.split = plan_.split;
  options.kernel = kernel_;
  auto routing = group_->latency_dispatch(in, out, options, device_.stream());
  if (!routing) return routing.status();
  if (Status status = note_sent(); !status) return status;
  retire(std::exchange(latency_routing_, std::move(*routing)));
  return plan_.split ? group_->latency_receive(latency_routing_, device_.stream()) : Status();
}

Status Operations::latency_combine() {
  LatencyCombineInput in;
  LatencyCombineOutput out;
  in.x = {buffers_.y.data(), DType::kBfloat16, {latency_routing_.num_recv_rows(), plan_.hidden}};
  if (plan_.late_weights) in.topk_weights = route_input().topk_weights;
  out.x = {buffers_.out.data(), DType::kBfloat16, {plan_.num_tokens, plan_.hidden}};
  LatencyCombineOptions options;
  options.order = plan_.order;
  options.wire_format = plan_.wire_format;
  options.split = plan_.split;
  options.kernel = kernel_;
  Status status = group_->latency_combine(latency_routing_, in, out, device_.stream(), options);
  if (status) status = note_sent();
  if (!status || !plan_.split) return status;
  return group_->latency_receive(latency_routing_, device_.stream());
}

Status Operations::note_sent() {
  sent_ns_ = now_ns();
  return on_sent_ ? on_sent_() : Status();
}

Status Operations::latency_pair() {
  Status status = latency_dispatch();
  return status ? latency_combine() : status;
}

Status Operations::latency_pairs_to_capture(int num_pairs) {
  for (int i = 0; i < num_pairs; ++i) {
    if (Status status = latency_pair(); !status) return status;
    captured_.push_back(latency_routing_);
  }
  return {};
}

Status Operations::reference() {
  if (plan_.measures_dispatch()) {
    Status status = route();
    if (status) status = dispatch();
    if (!status) return status;
  }
  return plan_.measures_combine() ? combine() : Status();
}

}  // namespace ferry::tools
