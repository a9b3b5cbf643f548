#include "deep_ep_arguments.hpp"

#include "errors.hpp"

namespace nb = nanobind;

namespace ferry::python {
namespace {

constexpr std::int64_t kRowGranuleBytes = 16;

/// None, a tensor [T, H] bf16, or up to two. False if it is anything else.
bool find_biases(nb::handle bias, Place place, std::int64_t num_tokens, std::int64_t hidden, CombineInput& in) {
  if (bias.is_none()) return true;
  const auto find = [&](nb::handle tensor, ConstTensorView& view) {
    const std::optional<TensorView> found = find_table(tensor, place, DType::kBfloat16, {num_tokens, hidden});
    if (found) view = *found;
    return found.has_value();
  };
  if (!nb::isinstance<nb::tuple>(bias) && !nb::isinstance<nb::list>(bias)) return find(bias, in.bias[0]);
  const std::size_t count = nb::len(bias);
  if (count > in.bias.size()) return false;
  for (std::size_t i = 0; i < count; ++i) {
    if (!find(nb::object(bias[i]), in.bias[i])) return false;
  }
  return true;
}

}  // namespace

std::optional<TensorView> find_table(nb::handle tensor, Place place, DType dtype,
                                     std::initializer_list<std::int64_t> shape, bool is_bool) {
  const std::optional<ReadTensor> read = find_tensor(tensor, place);
  if (!read || read->view.dtype != dtype || read->is_bool != is_bool ||
      read->view.num_dims != static_cast<int>(shape.size())) {
    return std::nullopt;
  }
  int dim = 0;
  for (const std::int64_t size : shape) {
    if (size != kAny && read->view.extent(dim) != size) return std::nullopt;
    ++dim;
  }
  return is_contiguous(read->view) ? std::optional(read->view) : std::nullopt;
}

std::optional<TensorView> find_rows(nb::handle tensor, Place place) {
  const std::optional<ReadTensor> read = find_tensor(tensor, place);
  if (!read || read->view.num_dims != 2 || !is_contiguous(read->view)) return std::nullopt;
  const std::int64_t row_bytes = read->view.extent(1) * static_cast<std::int64_t>(size_bytes(read->view.dtype));
  return row_bytes > 0 && row_bytes % kRowGranuleBytes == 0 ? std::optional(read->view) : std::nullopt;
}

std::optional<Payload> find_payload(nb::handle x, Place place) {
  const bool is_pair = nb::isinstance<nb::tuple>(x) || nb::isinstance<nb::list>(x);
  if (is_pair && nb::len(x) != 2) return std::nullopt;
  Payload payload;
  payload.rows = is_pair ? nb::object(x[0]) : nb::borrow(x);
  if (is_pair) payload.scales = x[1];
  const std::optional<TensorView> rows = find_rows(payload.rows, place);
  if (!rows) return std::nullopt;
  payload.rows_view = *rows;
  if (!is_pair) return payload;
  const std::optional<ReadTensor> scales = find_tensor(payload.scales, place);
  if (!scales || (scales->view.dtype != DType::kFloat32 && scales->view.dtype != DType::kInt32) ||
      scales->view.num_dims != 2 || scales->view.extent(0) != rows->extent(0)) {
    return std::nullopt;
  }
  payload.scales_view = scales->view;
  return payload;
}

std::optional<std::int64_t> find_integer(nb::handle value) {
  std::int64_t result = 0;
  return PyLong_CheckExact(value.ptr()) && nb::try_cast(value, result, false) ? std::optional(result) : std::nullopt;
}

nb::object find_link(nb::handle tensor, const Name& name) {
  static const Name untyped_storage("untyped_storage");
  PyObject* storage = PyObject_CallMethodNoArgs(tensor.ptr(), untyped_storage.ptr());
  if (storage == nullptr) {
    PyErr_Clear();
    return {};
  }
  const nb::object kept = nb::steal(storage);
  return find_attribute(kept, name);
}

const PlacedRouting* find_routing(nb::handle routing, nb::handle group) {
  static const Name group_name("group");
  static const Name native_name("_native");
  const nb::object owner = find_attribute(routing, group_name);
  const nb::object native = find_attribute(routing, native_name);
  if (!owner.is(group) || !native.is_valid() || !nb::isinstance<PlacedRouting>(native)) return nullptr;
  const PlacedRouting* placed = nb::inst_ptr<PlacedRouting>(native);
  return placed->routing.present() ? placed : nullptr;
}

nb::object payload_of(Received& received) {
  if (!received.scales.is_valid()) return std::move(received.x);
  return nb::make_tuple(received.x, received.scales);
}

std::optional<ReadCombine> find_combine(const Calls& calls, const Routing& routing, nb::handle x,
                                        nb::handle topk_weights, nb::handle bias, bool by_expert) {
  const std::optional<TensorView> rows = find_rows(x, calls.place());
  if (!rows || rows->dtype != DType::kBfloat16) return std::nullopt;
  if (!by_expert && rows->extent(0) != routing.num_recv_rows()) return std::nullopt;
  ReadCombine call{x};
  call.in.x = *rows;
  if (!topk_weights.is_none()) {
    const std::int64_t num_rows = rows->extent(0);
    const std::optional<TensorView> weights =
        by_expert ? find_table(topk_weights, calls.place(), DType::kFloat32, {num_rows})
                  : find_table(topk_weights, calls.place(), DType::kFloat32, {num_rows, routing.num_topk()});
    if (!weights) return std::nullopt;
    call.in.weights = *weights;
  }
  if (!find_biases(bias, calls.place(), routing.num_tokens(), rows->extent(1), call.in)) return std::nullopt;
  return call;
}

void raise_known_errors(const Calls& calls) { raise_if_error(calls.group().poll()); }

}  // namespace ferry::python
