#include <optional>

#include "buffer_calls.hpp"
#include "objects.hpp"

namespace nb = nanobind;

namespace ferry::python {
namespace {

nb::object or_none(nb::object value) { return value.is_valid() ? std::move(value) : nb::none(); }

/// Whether the tensors of an EPHandle that its calls rely on are as its dispatch made them.
bool is_as_made(const Calls& calls, const Routing& routing, nb::handle handle) {
  static const Name ids_name("topk_idx");
  static const Name metadata_name("recv_src_metadata");
  const nb::object ids = find_attribute(handle, ids_name);
  const nb::object metadata = find_attribute(handle, metadata_name);
  if (!ids.is_valid() || !metadata.is_valid()) return false;
  const std::int64_t num_topk = routing.num_topk();
  return find_table(ids, calls.place(), DType::kInt64, {routing.num_tokens(), num_topk}) &&
         find_table(metadata, calls.place(), DType::kInt32, {routing.num_recv_rows(), 2 + num_topk});
}

}  // namespace

std::optional<BufferCalls::FoundElastic> BufferCalls::find_elastic(nb::handle handle) const {
  static const Name expands_name("do_expand");
  static const Name routing_name("_routing");
  if (!nb::isinstance(handle, elastic_handle_)) return std::nullopt;
  const nb::object expands = find_attribute(handle, expands_name);
  FoundElastic found{find_attribute(handle, routing_name)};
  if (!expands.is(nb::handle(Py_False)) || !found.routing.is_valid()) return std::nullopt;
  found.placed = find_routing(found.routing, group_);
  if (found.placed == nullptr || !is_as_made(*calls_, found.placed->routing, handle)) return std::nullopt;
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
  call.column_major_scales = form.column_major_scales;
  call.options.zero_padding = form.zero_padding;
  call.options.kernel.num_sms = *bound;
  Received received = calls.dispatch(routing, call, *stream);
  raise_known_errors(calls);
  return nb::make_tuple(payload_of(received), received.topk_idx, or_none(received.topk_weights), handle, new_event());
}

nb::object BufferCalls::elastic_combine(nb::handle x, nb::handle handle, nb::handle topk_weights, nb::handle bias,
                                        nb::handle num_sms) const {
  const std::optional<Stream> stream = calls_->allocator().stream();
  const std::optional<int> bound = find_bound(num_sms);
  if (!stream || !bound) return nb::none();
  const std::optional<FoundElastic> found = find_elastic(handle);
  if (!found) return nb::none();
  std::optional<ReadCombine> call = find_combine(*calls_, found->placed->routing, x, topk_weights, bias);
  if (!call) return nb::none();
  call->options.kernel.num_sms = *bound;
  Combined combined = calls_->combine(found->placed->routing, *call, *stream);
  raise_known_errors(*calls_);
  return nb::make_tuple(combined.x, combined.weights, new_event());
}

}  // namespace ferry::python
