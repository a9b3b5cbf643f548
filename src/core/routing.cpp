#include "ferry/routing.hpp"

#include "core/routing_state.hpp"

namespace ferry {

namespace {

/// `state`, completed with the results that are known only after the exchange.
const RoutingState& settled(const RoutingState& state) {
  state.settle();
  return state;
}

}  // namespace

std::int64_t Routing::num_tokens() const { return state_ ? state_->num_tokens : 0; }
int Routing::num_topk() const { return state_ ? state_->num_topk : 0; }
std::int64_t Routing::num_experts() const { return state_ ? state_->num_logical_experts : 0; }
std::int64_t Routing::num_physical_experts() const { return state_ ? state_->num_experts : 0; }
Layout Routing::layout() const { return state_ ? state_->layout : Layout::kTokens; }
std::int64_t Routing::num_recv_rows() const { return state_ ? state_->num_recv_rows : 0; }
std::int64_t Routing::num_used_rows() const { return state_ ? settled(*state_).num_used_rows : 0; }

std::int64_t Routing::num_local_experts() const {
  return state_ ? static_cast<std::int64_t>(state_->local_expert_ids.size()) : 0;
}

ConstTensorView Routing::num_recv_rows_view() const { return state_ ? state_->num_used_rows_view : ConstTensorView(); }

ConstTensorView Routing::num_rows_per_local_expert_view() const {
  return state_ ? state_->rows_per_expert_view : ConstTensorView();
}

ConstTensorView Routing::expert_row_offsets_view() const {
  return state_ ? state_->row_offsets_view : ConstTensorView();
}

ConstTensorView Routing::num_rows_per_expert_view() const {
  return state_ ? state_->expert_rows_view : ConstTensorView();
}

std::span<const std::int32_t> Routing::num_rows_per_local_expert() const {
  if (!state_) return {};
  return settled(*state_).num_rows_per_local_expert;
}

std::span<const std::int64_t> Routing::expert_row_offsets() const {
  if (!state_) return {};
  return settled(*state_).expert_row_offsets;
}

std::span<const std::int64_t> Routing::num_rows_from_rank() const {
  if (!state_) return {};
  return settled(*state_).num_rows_from_rank;
}

std::span<const std::int64_t> Routing::num_rows_to_rank() const {
  if (!state_) return {};
  return settled(*state_).num_rows_to_rank;
}

bool Routing::may_repeat_experts() const { return !state_ || settled(*state_).may_repeat_experts; }

std::span<const std::int32_t> Routing::local_expert_ids() const {
  if (!state_) return {};
  return state_->local_expert_ids;
}

ConstTensorView Routing::slots() const { return state_ ? state_->slots : ConstTensorView(); }
ConstTensorView Routing::source() const {
  if (!state_) return {};
  // A slab of latency mode has all its rows from the start: no wait is needed.
  return state_->source_ranges.present() ? state_->source : settled(*state_).source;
}

ConstTensorView Routing::source_ranges() const { return state_ ? state_->source_ranges : ConstTensorView(); }
ConstTensorView Routing::topk_idx() const { return state_ ? state_->topk_idx : ConstTensorView(); }
ConstTensorView Routing::topk_weights() const { return state_ ? state_->topk_weights : ConstTensorView(); }

}  // namespace ferry
