#include "deep_ep/checks.hpp"

#include <nanobind/stl/string.h>

#include <array>

#include "arguments.hpp"
#include "errors.hpp"

namespace nb = nanobind;

namespace ferry::python::deep_ep {
namespace {

constexpr std::int64_t kRowGranuleBytes = 16;

std::string text_of(nb::handle value) { return nb::cast<std::string>(nb::str(value)); }

std::string list_of(nb::handle sequence) { return repr_of(nb::steal(PySequence_List(sequence.ptr()))); }

std::string device_of(Place place) { return place.on_gpu ? "cuda:" + std::to_string(place.device) : "cpu"; }

const char* name_of(DType dtype, bool is_bool) {
  if (is_bool) return "torch.bool";
  switch (dtype) {
    case DType::kInt32:
      return "torch.int32";
    case DType::kInt64:
      return "torch.int64";
    case DType::kFloat32:
      return "torch.float32";
    case DType::kBfloat16:
      return "torch.bfloat16";
    default:
      return "torch.uint8";
  }
}

std::int64_t row_bytes_of(const TensorView& rows) {
  return rows.extent(1) * static_cast<std::int64_t>(size_bytes(rows.dtype));
}

bool has_shape(const TensorView& view, std::initializer_list<Extent> shape) {
  if (view.num_dims != static_cast<int>(shape.size())) return false;
  int dim = 0;
  for (const Extent& extent : shape) {
    if (extent.letter == nullptr && view.extent(dim) != extent.size) return false;
    ++dim;
  }
  return true;
}

/// A new reference; null, with a Python error set, if the tensor has no storage. The stable ABI has no shorter call.
PyObject* storage_of(nb::handle tensor) {
  static const Name untyped_storage("untyped_storage");
  PyObject* const self = tensor.ptr();
  return PyObject_VectorcallMethod(untyped_storage.ptr(), &self, 1, nullptr);
}

}  // namespace

nb::object payload_of(Received& received, const Payload& sent) {
  if (!sent.has_scales) return std::move(received.x);
  return nb::make_tuple(received.x, received.scales);
}

std::int64_t index_of(nb::handle value) {
  PyObject* const number = PyNumber_Index(value.ptr());
  if (number == nullptr) {
    if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) nb::raise_python_error();
    PyErr_Clear();
    return -1;
  }
  int overflow = 0;
  const long long result = PyLong_AsLongLongAndOverflow(number, &overflow);
  Py_DECREF(number);
  return overflow != 0 ? -1 : result;
}

nb::object find_link(nb::handle tensor, const Name& name) {
  PyObject* const storage = storage_of(tensor);
  if (storage == nullptr) {
    PyErr_Clear();
    return {};
  }
  const nb::object kept = nb::steal(storage);
  return find_attribute(kept, name);
}

void attach_link(nb::handle tensor, const Name& name, nb::handle link) {
  PyObject* const storage = storage_of(tensor);
  if (storage == nullptr) nb::raise_python_error();
  set_attribute(nb::steal(storage), name, link);
}

bool is_of_group(nb::handle routing, nb::handle group) {
  static const Name group_name("group");
  return find_attribute(routing, group_name).is(group);
}

bool is_tensor_of(const Calls& calls, nb::handle value) {
  static const Name device_name("device");
  if (!nb::isinstance(value, calls.allocator().tensor_type())) return false;
  const nb::object device = find_attribute(value, device_name);
  return device.is_valid() && text_of(device) == device_of(calls.place());
}

bool is_sequence(nb::handle value) { return nb::isinstance<nb::tuple>(value) || nb::isinstance<nb::list>(value); }

void Checks::refuse(const std::string& text) const { python::refuse(std::string(operation_) + ": " + text); }

void Checks::tensor(nb::handle tensor, const std::string& name) const {
  const std::string device = device_of(calls_.place());
  if (!nb::isinstance(tensor, calls_.allocator().tensor_type())) {
    refuse(name + " is a " + class_name(tensor) + ", expected a torch.Tensor on " + device);
  }
  if (const std::string found = text_of(tensor.attr("device")); found != device) {
    refuse(name + " is on " + found + ", expected " + device +
           ", the device of the buffer; move it with .to(), or create the buffer with device=");
  }
}

void Checks::dtype(nb::handle tensor, const std::string& name, DType dtype, bool is_bool) const {
  const std::string wanted = name_of(dtype, is_bool);
  const std::string found = text_of(dtype_of(tensor));
  if (found != wanted)
    refuse(name + " has dtype " + found + ", expected " + wanted + "; convert it with .to(" + wanted + ")");
}

void Checks::contiguous(nb::handle tensor, const std::string& name) const {
  if (nb::cast<bool>(tensor.attr("is_contiguous")())) return;
  refuse(name + " has shape " + list_of(tensor.attr("shape")) + " and strides " + list_of(tensor.attr("stride")()) +
         ", expected a contiguous tensor; call .contiguous()");
}

void Checks::refuse_table(nb::handle tensor, const char* name, DType dtype, std::initializer_list<Extent> shape,
                          bool is_bool) const {
  this->tensor(tensor, name);
  this->dtype(tensor, name, dtype, is_bool);
  const nb::object found = tensor.attr("shape");
  bool differs = nb::len(found) != shape.size();
  std::string expected;
  std::size_t dim = 0;
  for (const Extent& extent : shape) {
    if (dim > 0) expected += ", ";
    expected += extent.letter != nullptr ? extent.letter : std::to_string(extent.size);
    if (!differs && extent.letter == nullptr) differs = nb::cast<std::int64_t>(found[dim]) != extent.size;
    ++dim;
  }
  if (differs) {
    refuse(std::string(name) + " has shape " + list_of(found) + ", expected [" + expected + "]");
  }
  contiguous(tensor, name);
  refuse_unreadable(tensor, calls_.place(), what(name));
}

TensorView Checks::table(nb::handle tensor, const char* name, DType dtype, std::initializer_list<Extent> shape,
                         bool is_bool) const {
  const std::optional<ReadTensor> read = find_tensor(tensor, calls_.place());
  if (!read || read->view.dtype != dtype || read->is_bool != is_bool || !has_shape(read->view, shape) ||
      !is_contiguous(read->view)) {
    refuse_table(tensor, name, dtype, shape, is_bool);
  }
  return read->view;
}

TensorView Checks::table_or_none(nb::handle tensor, const char* name, DType dtype,
                                 std::initializer_list<Extent> shape) const {
  return tensor.is_none() ? TensorView() : table(tensor, name, dtype, shape);
}

void Checks::refuse_rows(nb::handle tensor, const char* name, std::optional<DType> dtype) const {
  this->tensor(tensor, name);
  if (dtype) this->dtype(tensor, name, *dtype);
  const nb::object shape = tensor.attr("shape");
  if (nb::len(shape) != 2) refuse(std::string(name) + " has shape " + list_of(shape) + ", expected [T, H]");
  const std::int64_t hidden = nb::cast<std::int64_t>(shape[1]);
  const std::int64_t element_bytes = nb::cast<std::int64_t>(tensor.attr("element_size")());
  if (hidden == 0 || hidden * element_bytes % kRowGranuleBytes != 0) {
    refuse(std::string(name) + " has rows of " + std::to_string(hidden) + " x " + std::to_string(element_bytes) +
           " bytes, expected a positive multiple of " + std::to_string(kRowGranuleBytes) + " bytes");
  }
  contiguous(tensor, name);
  refuse_unreadable(tensor, calls_.place(), what(name));
}

TensorView Checks::rows(nb::handle tensor, const char* name, std::optional<DType> dtype) const {
  const std::optional<ReadTensor> read = find_tensor(tensor, calls_.place());
  if (!read || (dtype && read->view.dtype != *dtype) || read->view.num_dims != 2 || row_bytes_of(read->view) == 0 ||
      row_bytes_of(read->view) % kRowGranuleBytes != 0 || !is_contiguous(read->view)) {
    refuse_rows(tensor, name, dtype);
  }
  return read->view;
}

Payload Checks::payload(nb::handle x) const {
  Payload payload;
  payload.has_scales = is_sequence(x);
  if (!payload.has_scales) {
    payload.rows = nb::borrow(x);
    payload.rows_view = rows(x, "x");
    return payload;
  }
  if (nb::len(x) != 2) refuse("x is a tuple of " + std::to_string(nb::len(x)) + ", expected (rows, scales)");
  payload.rows = x[0];
  payload.scales = x[1];
  payload.rows_view = rows(payload.rows, "x[0]");
  const char* const name = "x[1] (scales)";
  const std::optional<ReadTensor> read = find_tensor(payload.scales, calls_.place());
  if (!read) tensor(payload.scales, name);
  const std::string dtype = read ? "" : text_of(dtype_of(payload.scales));
  const bool has_dtype = read ? read->view.dtype == DType::kFloat32 || read->view.dtype == DType::kInt32
                              : dtype == "torch.float32" || dtype == "torch.int32";
  if (!has_dtype) {
    refuse(std::string(name) + " has dtype " + text_of(dtype_of(payload.scales)) +
           ", expected torch.float32 or torch.int32");
  }
  if (!read || read->view.num_dims > 2 || read->view.extent(0) != payload.rows_view.extent(0)) {
    refuse(std::string(name) + " has shape " + list_of(payload.scales.attr("shape")) + ", expected [" +
           std::to_string(payload.rows_view.extent(0)) + ", S]");
  }
  TensorView& scales = payload.scales_view = read->view;
  payload.scales_have_one_dim = scales.num_dims == 1;
  if (payload.scales_have_one_dim) {
    scales.num_dims = 2;
    scales.shape[1] = 1;
    scales.strides[1] = 1;
  }
  return payload;
}

Choice Checks::choice(nb::handle topk_idx, nb::handle topk_weights, std::int64_t num_tokens, DType ids) const {
  Choice choice{table(topk_idx, "topk_idx", ids, {num_tokens, "K"})};
  const std::int64_t num_topk = choice.ids.extent(1);
  if (num_topk < 1 || num_topk > kMaxTopk) {
    refuse("topk_idx has K = " + std::to_string(num_topk) + ", expected 1 to " + std::to_string(kMaxTopk));
  }
  choice.weights = table_or_none(topk_weights, "topk_weights", DType::kFloat32, {num_tokens, num_topk});
  return choice;
}

nb::list Checks::biases(nb::handle bias, std::int64_t num_tokens, std::int64_t hidden, CombineInput& in) const {
  nb::list biases;
  if (bias.is_none()) return biases;
  const auto read = [&](nb::handle tensor) { return table(tensor, "bias", DType::kBfloat16, {num_tokens, hidden}); };
  if (nb::isinstance(bias, calls_.allocator().tensor_type())) {
    in.bias[0] = read(bias);
    biases.append(bias);
    return biases;
  }
  PyObject* const list = PySequence_List(bias.ptr());
  if (list == nullptr) nb::raise_python_error();
  biases = nb::steal<nb::list>(list);
  const std::size_t count = biases.size();
  if (count > in.bias.size()) refuse(std::to_string(count) + " biases, expected at most two; add them first");
  for (std::size_t i = 0; i < count; ++i) in.bias[i] = read(nb::object(biases[i]));
  return biases;
}

std::int64_t Checks::num_experts(nb::handle value) const {
  const std::int64_t number = index_of(value);
  const bool is_right = number >= 1 && number % calls_.group().num_ranks() == 0;
  return num_experts(number, is_right ? std::string() : repr_of(value));
}

std::int64_t Checks::num_experts(std::int64_t number, const std::string& shown) const {
  const int num_ranks = calls_.group().num_ranks();
  if (number < 1 || number % num_ranks != 0) {
    refuse("num_experts is " + shown + ", expected a multiple of " + std::to_string(num_ranks) +
           ", the number of ranks");
  }
  return number;
}

std::int64_t Checks::size(nb::handle value, const char* name) const {
  const std::int64_t number = index_of(value);
  if (number < 1) refuse(std::string(name) + " is " + repr_of(value) + ", expected an integer of at least 1");
  return number;
}

TensorView Checks::expert_stats(nb::handle stats, std::int64_t num_local) const {
  return table_or_none(stats, "cumulative_local_expert_recv_stats", DType::kInt32, {num_local});
}

TensorView Checks::wait_stats(nb::handle stats, const char* name) const {
  return table_or_none(stats, name, DType::kInt64, {std::int64_t{calls_.group().num_ranks()}});
}

}  // namespace ferry::python::deep_ep
