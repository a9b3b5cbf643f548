#include <cstdint>
#include <limits>
#include <optional>

#include "buffer_calls.hpp"
#include "objects.hpp"

namespace nb = nanobind;

namespace ferry::python {
namespace {

nb::object or_none(nb::object value) { return value.is_valid() ? std::move(value) : nb::none(); }

/// The metadata of an EPHandle whose tensors that its calls rely on have the shapes that its dispatch gave them.
std::optional<TensorView> find_metadata(const Calls& calls, const Routing& routing, nb::handle handle,
                                        nb::object& metadata) {
  static const Name ids_name("topk_idx");
  static const Name metadata_name("recv_src_metadata");
  const nb::object ids = find_attribute(handle, ids_name);
  metadata = find_attribute(handle, metadata_name);
  if (!ids.is_valid() || !metadata.is_valid()) return std::nullopt;
  const std::int64_t num_topk = routing.num_topk();
  if (!find_table(ids, calls.place(), DType::kInt64, {routing.num_tokens(), num_topk})) return std::nullopt;
  return find_table(metadata, calls.place(), DType::kInt32, {routing.num_recv_rows(), 2 + num_topk});
}

bool is_aligned(const ConstTensorView& rows) {
  constexpr std::uintptr_t kGranuleBytes = 16;
  return reinterpret_cast<std::uintptr_t>(rows.data) % kGranuleBytes == 0;
}

}  // namespace

std::optional<BufferCalls::FoundElastic> BufferCalls::find_elastic(nb::handle handle) const {
  static const Name expands_name("do_expand");
  static const Name routing_name("_routing");
  static const Name num_expanded_name("num_expanded_tokens");
  static const Name last_equal_name("_last_equal");
  if (!nb::isinstance(handle, elastic_handle_)) return std::nullopt;
  const nb::object expands = find_attribute(handle, expands_name);
  FoundElastic found{find_attribute(handle, routing_name)};
  found.expands = expands.is(nb::handle(Py_True));
  if ((!found.expands && !expands.is(nb::handle(Py_False))) || !found.routing.is_valid()) return std::nullopt;
  found.placed = find_routing(found.routing, group_);
  if (found.placed == nullptr) return std::nullopt;
  const Routing& routing = found.placed->routing;
  const std::optional<TensorView> metadata = find_metadata(*calls_, routing, handle, found.metadata);
  if (!metadata) return std::nullopt;
  if (!found.expands) return found;
  const nb::object num_expanded = find_attribute(handle, num_expanded_name);
  found.last_equal = find_attribute(handle, last_equal_name);
  if (!num_expanded.is_valid() || !found.last_equal.is_valid()) return std::nullopt;
  const std::optional<std::int64_t> rows = find_integer(num_expanded);
  const std::optional<TensorView> last =
      find_table(found.last_equal, calls_->place(), DType::kInt8, {routing.num_recv_rows(), routing.num_topk()});
  if (!rows || *rows < 0 || *rows > std::numeric_limits<std::int32_t>::max() || !last) return std::nullopt;
  found.num_expanded = *rows;
  found.slots = slots_of(*metadata, *last);
  return found;
}

nb::object BufferCalls::elastic_dispatch_again(nb::handle x, nb::handle handle, nb::handle topk_weights,
                                               const ElasticForm& form, nb::handle num_sms) const {
  static const Name bounded_name("is_bounded");
  const Calls& calls = *calls_;
  const std::optional<Stream> stream = calls.allocator().stream();
  const std::optional<int> bound = find_bound(num_sms);
  const std::optional<Payload> payload = find_payload(x, calls.place());
  if (!stream || !bound || !payload) return nb::none();
  const std::optional<FoundElastic> found = find_elastic(handle);
  if (!found || payload->rows_view.extent(0) != found->placed->routing.num_tokens()) return nb::none();
  const Routing& routing = found->placed->routing;
  ReadDispatch call{payload->rows, payload->scales};
  call.in.x = payload->rows_view;
  call.in.scales = payload->scales_view;
  if (!topk_weights.is_none()) {
    const std::optional<TensorView> weights =
        find_table(topk_weights, calls.place(), DType::kFloat32, {routing.num_tokens(), routing.num_topk()});
    if (!weights) return nb::none();
    call.in.topk_weights = *weights;
  }
  call.tables = true;
  call.weights = call.in.topk_weights.present();
  call.bounded = find_attribute(found->routing, bounded_name).is(nb::handle(Py_True));
  call.column_major_scales = form.column_major_scales && !found->expands;
  call.options.zero_padding = form.zero_padding && !found->expands;
  call.options.kernel.num_sms = *bound;
  Received received = calls.dispatch(routing, call, *stream);
  if (found->expands) {
    received = expand(calls, received, found->slots, {found->num_expanded, form.zero_padding, form.column_major_scales},
                      *stream);
  }
  raise_known_errors(calls);
  return nb::make_tuple(payload_of(received), or_none(received.topk_idx), or_none(received.topk_weights), handle,
                        new_event());
}

nb::object BufferCalls::elastic_combine(nb::handle x, nb::handle handle, nb::handle topk_weights, nb::handle bias,
                                        nb::handle num_sms) const {
  const std::optional<Stream> stream = calls_->allocator().stream();
  const std::optional<int> bound = find_bound(num_sms);
  if (!stream || !bound) return nb::none();
  const std::optional<FoundElastic> found = find_elastic(handle);
  if (!found) return nb::none();
  std::optional<ReadCombine> call =
      find_combine(*calls_, found->placed->routing, x, topk_weights, bias, found->expands);
  if (!call) return nb::none();
  call->options.kernel.num_sms = *bound;
  if (found->expands) return combine_expanded(*found, *call, *stream);
  Combined combined = calls_->combine(found->placed->routing, *call, *stream);
  raise_known_errors(*calls_);
  return nb::make_tuple(combined.x, combined.weights, new_event());
}

nb::object BufferCalls::combine_expanded(const FoundElastic& found, ReadCombine call, Stream stream) const {
  const ConstTensorView x = call.in.x;
  if (!is_aligned(x)) return nb::none();
  // On a GPU the host cannot look.
  if (!calls_->place().on_gpu && names_row_past(found.slots.slots, x.extent(0))) return nb::none();
  const Routing& routing = found.placed->routing;
  Reduced reduced;
  try {
    reduced = reduce(
        *calls_, {.slots = found.slots.slots, .x = x, .weights = call.in.weights, .last_equal = found.slots.last_equal},
        false, stream);
  } catch (...) {
    calls_->refuse_combine(routing, stream);
    throw;
  }
  call.in.x = reduced.x_view;
  call.in.weights = reduced.weights_view;
  Combined combined = calls_->combine(routing, call, stream);
  raise_known_errors(*calls_);
  return nb::make_tuple(combined.x, combined.weights, new_event());
}

}  // namespace ferry::python
