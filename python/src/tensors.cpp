#include "tensors.hpp"

#include <nanobind/ndarray.h>

#include <array>
#include <cstdint>
#include <optional>
#include <utility>

#include "views.hpp"

namespace nb = nanobind;

namespace ferry::python {
namespace {

/// The C interface of DLPack 1.3 as far as it is used here; the names are the specification's.
struct DLPackVersion {
  std::uint32_t major;
  std::uint32_t minor;
};
struct DLPackExchangeAPIHeader {
  DLPackVersion version;
  DLPackExchangeAPIHeader* prev_api;
};
struct DLManagedTensorVersioned {
  DLPackVersion version;
  void* manager_ctx;
  void (*deleter)(DLManagedTensorVersioned* self);
  std::uint64_t flags;
  nb::dlpack::dltensor dl_tensor;
};
struct DLPackExchangeAPI {
  DLPackExchangeAPIHeader header;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  /// Takes the tensor over, also where it fails: -1 with a Python error set.
  int (*managed_tensor_to_py_object_no_sync)(DLManagedTensorVersioned* tensor, void** out);
  /// Fills a tensor that borrows the object's memory, shape and strides; -1 with a Python error set.
  int (*dltensor_from_py_object_no_sync)(void* object, nb::dlpack::dltensor* out);
  /// -1 with a Python error set.
  int (*current_work_stream)(int device_type, std::int32_t device, void** out);
};
constexpr const char* kAttribute = "__dlpack_c_exchange_api__";
constexpr const char* kCapsuleName = "dlpack_exchange_api";
constexpr std::uint32_t kMajorVersion = 1;

/// The table of a type itself, null if it has none. Types live as long as the interpreter: torch's are never freed.
const DLPackExchangeAPI* own_table(PyTypeObject* type) {
  PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), kAttribute);
  if (capsule == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  const auto* table = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule, kCapsuleName));
  Py_DECREF(capsule);
  if (table == nullptr) PyErr_Clear();
  // A table of another major version may be the first of a list that has ours.
  while (table != nullptr && table->header.version.major != kMajorVersion) {
    table = reinterpret_cast<const DLPackExchangeAPI*>(table->header.prev_api);
  }
  return table != nullptr && table->dltensor_from_py_object_no_sync != nullptr ? table : nullptr;
}

/// Null at the end. The stable ABI hides the fields of types.
PyTypeObject* base_of(PyTypeObject* type) { return static_cast<PyTypeObject*>(PyType_GetSlot(type, Py_tp_base)); }

/// The same, or that of the nearest base: a base's functions take objects of its subclasses.
const DLPackExchangeAPI* find_table(PyTypeObject* type) {
  const DLPackExchangeAPI* table = nullptr;
  for (; table == nullptr && type != nullptr; type = base_of(type)) table = own_table(type);
  return table;
}

/// Few types are ever passed: torch.Tensor and torch.nn.Parameter. Used with the GIL held.
const DLPackExchangeAPI* table_of(PyTypeObject* type) {
  struct Known {
    PyTypeObject* type = nullptr;
    const DLPackExchangeAPI* table = nullptr;
  };
  static std::array<Known, 4> known;
  for (const Known& one : known) {
    if (one.type == type) return one.table;
  }
  const DLPackExchangeAPI* table = find_table(type);
  if (table == nullptr) return nullptr;
  for (Known& one : known) {
    if (one.type != nullptr) continue;
    Py_INCREF(reinterpret_cast<PyObject*>(type));
    one = {type, table};
    break;
  }
  return table;
}

/// A tensor that another library uses: deletes itself when that is done with it.
struct SharedTensor {
  DLManagedTensorVersioned managed{};
  std::shared_ptr<const void> owner;
  std::array<std::int64_t, kMaxTensorDims> shape{};
  std::array<std::int64_t, kMaxTensorDims> strides{};
};

std::optional<DType> dtype_of(const nb::dlpack::dtype& dtype) {
  if (dtype.lanes != 1) return std::nullopt;
  switch (dtype.code) {
    case kDLInt:
      if (dtype.bits == 8) return DType::kInt8;
      if (dtype.bits == 32) return DType::kInt32;
      if (dtype.bits == 64) return DType::kInt64;
      return std::nullopt;
    case kDLUInt:
    case kDLBool:
      return dtype.bits == 8 ? std::optional(DType::kUint8) : std::nullopt;
    case kDLFloat:
      if (dtype.bits == 32) return DType::kFloat32;
      if (dtype.bits == 16) return DType::kFloat16;
      return std::nullopt;
    case kDLBfloat:
      return dtype.bits == 16 ? std::optional(DType::kBfloat16) : std::nullopt;
    case kDLFloat8E4M3FN:
      return DType::kFloat8E4M3;
    default:
      return std::nullopt;
  }
}

bool is_at(const nb::dlpack::dltensor& tensor, Place place) {
  if (!place.on_gpu) return tensor.device.device_type == nb::device::cpu::value;
  return tensor.device.device_type == nb::device::cuda::value && tensor.device.device_id == place.device;
}

}  // namespace

std::optional<ReadTensor> find_tensor(nb::handle tensor, Place place) {
  const DLPackExchangeAPI* table = table_of(Py_TYPE(tensor.ptr()));
  if (table == nullptr) return std::nullopt;
  nb::dlpack::dltensor borrowed{};
  if (table->dltensor_from_py_object_no_sync(tensor.ptr(), &borrowed) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  const std::optional<DType> dtype = dtype_of(borrowed.dtype);
  if (!dtype || !is_at(borrowed, place) || borrowed.ndim < 1 || borrowed.ndim > kMaxTensorDims) return std::nullopt;
  ReadTensor read;
  read.is_bool = borrowed.dtype.code == kDLBool;
  TensorView& view = read.view;
  view.data = static_cast<std::byte*>(borrowed.data) + borrowed.byte_offset;
  view.dtype = *dtype;
  view.num_dims = borrowed.ndim;
  for (int dim = 0; dim < borrowed.ndim; ++dim) {
    view.shape[static_cast<std::size_t>(dim)] = borrowed.shape[dim];
  }
  std::int64_t dense = 1;
  for (int dim = borrowed.ndim - 1; dim >= 0; --dim) {
    const auto at = static_cast<std::size_t>(dim);
    view.strides[at] = borrowed.strides != nullptr ? borrowed.strides[dim] : dense;
    dense *= view.shape[at];
  }
  return read;
}

nb::object tensor_on(const ConstTensorView& view, Place place, std::shared_ptr<const void> owner, nb::handle type) {
  const DLPackExchangeAPI* export_api = table_of(reinterpret_cast<PyTypeObject*>(type.ptr()));
  if (export_api == nullptr || export_api->managed_tensor_to_py_object_no_sync == nullptr) {
    const nb::capsule keeper(new std::shared_ptr<const void>(std::move(owner)),
                             [](void* kept) noexcept { delete static_cast<std::shared_ptr<const void>*>(kept); });
    return nb::module_::import_("torch").attr("from_dlpack")(array_of(view, place, keeper));
  }
  auto shared = std::make_unique<SharedTensor>();
  shared->owner = std::move(owner);
  shared->shape = view.shape;
  shared->strides = view.strides;
  nb::dlpack::dltensor& tensor = shared->managed.dl_tensor;
  tensor.data = const_cast<void*>(view.data);
  tensor.device = {place.on_gpu ? nb::device::cuda::value : nb::device::cpu::value, place.device};
  tensor.ndim = view.num_dims;
  tensor.dtype = dlpack_dtype(view.dtype);
  tensor.shape = shared->shape.data();
  tensor.strides = shared->strides.data();
  shared->managed.version = {kMajorVersion, 0};
  shared->managed.manager_ctx = shared.get();
  shared->managed.deleter = [](DLManagedTensorVersioned* self) {
    delete static_cast<SharedTensor*>(self->manager_ctx);
  };
  void* made = nullptr;
  if (export_api->managed_tensor_to_py_object_no_sync(&shared.release()->managed, &made) != 0) nb::raise_python_error();
  return nb::steal(static_cast<PyObject*>(made));
}

TensorView read_tensor(nb::handle tensor, Place place) {
  const std::optional<ReadTensor> read = find_tensor(tensor, place);
  if (!read) {
    throw BadTensor("not a tensor that DLPack describes, or on another device, or of another dtype or dimensions");
  }
  return read->view;
}

bool is_contiguous(const TensorView& view) {
  std::int64_t dense = 1;
  bool in_order = true;
  for (int dim = view.num_dims - 1; dim >= 0; --dim) {
    const std::int64_t extent = view.extent(dim);
    if (extent == 0) return true;
    if (extent != 1 && view.stride(dim) != dense) in_order = false;
    dense *= extent;
  }
  return in_order;
}

std::optional<Stream> work_stream(nb::handle type, Place place) {
  if (!place.on_gpu) return Stream{};
  const DLPackExchangeAPI* table = table_of(reinterpret_cast<PyTypeObject*>(type.ptr()));
  if (table == nullptr || table->current_work_stream == nullptr) return std::nullopt;
  Stream stream;
  if (table->current_work_stream(nb::device::cuda::value, place.device, &stream.handle) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  return stream;
}

}  // namespace ferry::python
