#include "elastic.hpp"

#include <optional>

#include "deep_ep_arguments.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferry::python {
namespace {

/// The tensors of an EPHandle that must be as its dispatch made them: topk_idx, recv_src_metadata.
bool is_as_made(const Calls& calls, const Routing& routing, const nb::tuple& tensors) {
  const std::int64_t num_topk = routing.num_topk();
  return find_table(nb::object(tensors[0]), calls.place(), DType::kInt64, {routing.num_tokens(), num_topk}) &&
         find_table(nb::object(tensors[1]), calls.place(), DType::kInt32, {routing.num_recv_rows(), 2 + num_topk});
}

/// A cached dispatch, not expanded. -> payload, ids, weights
nb::object elastic_dispatch_again(const Calls& calls, const PlacedRouting& placed, nb::handle x,
                                  nb::handle topk_weights, const nb::tuple& tensors, bool bounded, bool zero_padding,
                                  int num_sms) {
  const Routing& routing = placed.routing;
  const std::optional<Stream> stream = calls.allocator().stream();
  const std::optional<Payload> payload = find_payload(x, calls.place());
  if (!stream || !payload || payload->rows_view.extent(0) != routing.num_tokens() ||
      !is_as_made(calls, routing, tensors)) {
    return nb::none();
  }
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
  call.bounded = bounded;
  call.options.zero_padding = zero_padding;
  call.options.kernel.num_sms = num_sms;
  Received received = calls.dispatch(routing, call, *stream);
  raise_known_errors(calls);
  return nb::make_tuple(payload_of(received), received.topk_idx,
                        received.topk_weights.is_valid() ? received.topk_weights : nb::none());
}

/// A combine, not expanded. -> sums, sums of the weights or None
nb::object elastic_combine(const Calls& calls, const PlacedRouting& placed, nb::handle x, nb::handle topk_weights,
                           nb::handle bias, const nb::tuple& tensors, int num_sms) {
  const std::optional<Stream> stream = calls.allocator().stream();
  if (!stream || !is_as_made(calls, placed.routing, tensors)) return nb::none();
  std::optional<ReadCombine> call = find_combine(calls, placed.routing, x, topk_weights, bias);
  if (!call) return nb::none();
  call->options.kernel.num_sms = num_sms;
  Combined combined = calls.combine(placed.routing, *call, *stream);
  raise_known_errors(calls);
  return nb::make_tuple(combined.x, combined.weights);
}

}  // namespace

void define_elastic(nb::module_& module) {
  module.def("elastic_dispatch_again", &elastic_dispatch_again, "calls"_a, "routing"_a, "x"_a.none(),
             "topk_weights"_a.none(), "tensors"_a, "bounded"_a, "zero_padding"_a, "num_sms"_a);
  module.def("elastic_combine", &elastic_combine, "calls"_a, "routing"_a, "x"_a.none(), "topk_weights"_a.none(),
             "bias"_a.none(), "tensors"_a, "num_sms"_a);
}

}  // namespace ferry::python
