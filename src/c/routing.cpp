/// C interface of the accessors of a routing.

#include "ferry/routing.hpp"

#include "c/convert.hpp"
#include "c/handles.hpp"
#include "c/status.hpp"

namespace ferry::c {
namespace {

/// Any accessor may fail, because values known only after the exchange may be fetched from a GPU here.
template <typename Value>
Value read(const ferry_routing* handle, Value (Routing::*accessor)() const, Value otherwise) {
  if (handle == nullptr) return otherwise;
  return guarded_or(otherwise, [&] { return (handle->value.*accessor)(); });
}

template <typename Element>
const Element* read_array(const ferry_routing* handle, std::span<const Element> (Routing::*accessor)() const,
                          std::int64_t* num) {
  const std::span<const Element> elements = read(handle, accessor, std::span<const Element>());
  if (num != nullptr) *num = static_cast<std::int64_t>(elements.size());
  return elements.data();
}

void read_view(const ferry_routing* handle, ConstTensorView (Routing::*accessor)() const, ferry_tensor* view) {
  if (view != nullptr) *view = to_tensor(read(handle, accessor, ConstTensorView()));
}

}  // namespace
}  // namespace ferry::c

using namespace ferry::c;
using ferry::Routing;

void ferry_routing_free(ferry_routing* routing) { delete routing; }

int64_t ferry_routing_num_tokens(const ferry_routing* routing) {
  return read(routing, &Routing::num_tokens, std::int64_t{0});
}
int32_t ferry_routing_num_topk(const ferry_routing* routing) { return read(routing, &Routing::num_topk, 0); }
int64_t ferry_routing_num_experts(const ferry_routing* routing) {
  return read(routing, &Routing::num_experts, std::int64_t{0});
}
int64_t ferry_routing_num_physical_experts(const ferry_routing* routing) {
  return read(routing, &Routing::num_physical_experts, std::int64_t{0});
}
int64_t ferry_routing_num_local_experts(const ferry_routing* routing) {
  return read(routing, &Routing::num_local_experts, std::int64_t{0});
}
int32_t ferry_routing_layout(const ferry_routing* routing) {
  return static_cast<int32_t>(read(routing, &Routing::layout, ferry::Layout::kTokens));
}
int64_t ferry_routing_num_recv_rows(const ferry_routing* routing) {
  return read(routing, &Routing::num_recv_rows, std::int64_t{0});
}
int64_t ferry_routing_num_used_rows(const ferry_routing* routing) {
  return read(routing, &Routing::num_used_rows, std::int64_t{0});
}
int32_t ferry_routing_may_repeat_experts(const ferry_routing* routing) {
  return read(routing, &Routing::may_repeat_experts, true) ? 1 : 0;
}

const int32_t* ferry_routing_num_rows_per_local_expert(const ferry_routing* routing, int64_t* num) {
  return read_array(routing, &Routing::num_rows_per_local_expert, num);
}
const int64_t* ferry_routing_expert_row_offsets(const ferry_routing* routing, int64_t* num) {
  return read_array(routing, &Routing::expert_row_offsets, num);
}
const int64_t* ferry_routing_num_rows_from_rank(const ferry_routing* routing, int64_t* num) {
  return read_array(routing, &Routing::num_rows_from_rank, num);
}
const int64_t* ferry_routing_num_rows_to_rank(const ferry_routing* routing, int64_t* num) {
  return read_array(routing, &Routing::num_rows_to_rank, num);
}
const int32_t* ferry_routing_local_expert_ids(const ferry_routing* routing, int64_t* num) {
  return read_array(routing, &Routing::local_expert_ids, num);
}

void ferry_routing_slots(const ferry_routing* routing, ferry_tensor* view) {
  read_view(routing, &Routing::slots, view);
}
void ferry_routing_source(const ferry_routing* routing, ferry_tensor* view) {
  read_view(routing, &Routing::source, view);
}
void ferry_routing_source_ranges(const ferry_routing* routing, ferry_tensor* view) {
  read_view(routing, &Routing::source_ranges, view);
}
void ferry_routing_topk_idx(const ferry_routing* routing, ferry_tensor* view) {
  read_view(routing, &Routing::topk_idx, view);
}
void ferry_routing_topk_weights(const ferry_routing* routing, ferry_tensor* view) {
  read_view(routing, &Routing::topk_weights, view);
}
void ferry_routing_num_recv_rows_view(const ferry_routing* routing, ferry_tensor* view) {
  read_view(routing, &Routing::num_recv_rows_view, view);
}
void ferry_routing_num_rows_per_local_expert_view(const ferry_routing* routing, ferry_tensor* view) {
  read_view(routing, &Routing::num_rows_per_local_expert_view, view);
}
void ferry_routing_num_rows_per_expert_view(const ferry_routing* routing, ferry_tensor* view) {
  read_view(routing, &Routing::num_rows_per_expert_view, view);
}
void ferry_routing_expert_row_offsets_view(const ferry_routing* routing, ferry_tensor* view) {
  read_view(routing, &Routing::expert_row_offsets_view, view);
}
