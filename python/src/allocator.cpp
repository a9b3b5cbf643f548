#include "allocator.hpp"

#include <algorithm>
#include <utility>

#include "errors.hpp"
#include "gil.hpp"
#include "objects.hpp"

namespace nb = nanobind;

namespace ferry::python {
namespace {

nb::object call(const nb::object& function, std::span<PyObject* const> arguments) {
  PyObject* result = PyObject_Vectorcall(function.ptr(), arguments.data(), arguments.size(), nullptr);
  if (result == nullptr) nb::raise_python_error();
  return nb::steal(result);
}

nb::object integer(std::int64_t value) {
  PyObject* made = PyLong_FromLongLong(value);
  if (made == nullptr) nb::raise_python_error();
  return nb::steal(made);
}

/// Empty where it is missing or None.
nb::object optional_attribute(const nb::object& owner, const char* name) {
  nb::object value = nb::getattr(owner, name, nb::none());
  return value.is_none() ? nb::object() : value;
}

/// Tensors that share an allocation start at multiples of a line of memory.
constexpr std::int64_t kTogetherBytes = 128;
constexpr std::size_t kMostTogether = 8;

std::int64_t num_elements_of(const Wanted& wanted) {
  std::int64_t count = 1;
  for (int dim = 0; dim < wanted.num_dims; ++dim) count *= wanted.shape[static_cast<std::size_t>(dim)];
  return count;
}

nb::tuple shape_of(const Wanted& wanted) {
  const auto& shape = wanted.shape;
  if (wanted.num_dims == 1) return nb::make_tuple(shape[0]);
  if (wanted.num_dims == 2) return nb::make_tuple(shape[0], shape[1]);
  return nb::make_tuple(shape[0], shape[1], shape[2]);
}

nb::tuple strides_of(const Wanted& wanted) {
  const std::int64_t last = std::max<std::int64_t>(wanted.shape[static_cast<std::size_t>(wanted.num_dims) - 1], 1);
  if (wanted.num_dims == 1) return nb::make_tuple(1);
  if (wanted.num_dims == 2) return nb::make_tuple(last, 1);
  const std::int64_t middle = std::max<std::int64_t>(wanted.shape[1], 1);
  if (wanted.column_major) return nb::make_tuple(middle * last, 1, middle);
  return nb::make_tuple(middle * last, last, 1);
}

/// Shape of the contiguous tensor that is made where strides cannot be given.
nb::tuple stored_shape_of(const Wanted& wanted) {
  if (!wanted.column_major) return shape_of(wanted);
  return nb::make_tuple(wanted.shape[0], wanted.shape[2], wanted.shape[1]);
}

nb::object as_wanted(const Wanted& wanted, nb::object stored) {
  return wanted.column_major ? nb::object(stored.attr("transpose")(1, 2)) : std::move(stored);
}

/// While it lives, tensors that this thread makes come from a pool.
class PoolScope {
 public:
  PoolScope(const nb::object& begin, const nb::object& end, const nb::object& release, const nb::object& device,
            nb::handle id, SymmetricPool& pool)
      : end_(end), release_(release), arguments_{device.ptr(), id.ptr()} {
    call(begin, arguments_);
    pool.enter();
  }
  PoolScope(const PoolScope&) = delete;
  PoolScope& operator=(const PoolScope&) = delete;
  ~PoolScope() {
    SymmetricPool::leave();
    // No Python error is set here: an error of the code inside is held by its exception.
    for (const nb::object& function : {end_, release_}) {
      PyObject* result = PyObject_Vectorcall(function.ptr(), arguments_.data(), arguments_.size(), nullptr);
      if (result == nullptr) PyErr_WriteUnraisable(function.ptr());
      Py_XDECREF(result);
    }
  }

 private:
  nb::object end_;
  nb::object release_;
  std::array<PyObject*, 2> arguments_;
};

}  // namespace

Allocator::Allocator(nb::object memory, std::shared_ptr<SymmetricPool> pool, Place place)
    : memory_(std::move(memory)), pool_(std::move(pool)), place_(place) {
  const nb::module_ torch = nb::module_::import_("torch");
  tensor_type_ = torch.attr("Tensor");
  types_ = {torch.attr("int32"),         torch.attr("int64"), torch.attr("float32"),  torch.attr("bool"),
            torch.attr("float8_e4m3fn"), torch.attr("int8"),  torch.attr("bfloat16"), torch.attr("float16")};
  const nb::object functions = memory_.attr("torch_functions")();
  empty_strided_ = optional_attribute(functions, "empty_strided");
  reinterpret_ = optional_attribute(functions, "reinterpret");
  is_capturing_ = optional_attribute(functions, "is_capturing");
  begin_pool_ = optional_attribute(functions, "begin_pool");
  end_pool_ = optional_attribute(functions, "end_pool");
  release_pool_ = optional_attribute(functions, "release_pool");
}

Stream Allocator::any_stream() const {
  if (const std::optional<Stream> found = stream()) return *found;
  return {reinterpret_cast<void*>(nb::cast<std::uintptr_t>(memory_.attr("stream")()))};
}

bool Allocator::is_capturing() const {
  if (!place_.on_gpu) return false;
  if (is_capturing_.is_valid()) return call(is_capturing_, {}).is(nb::handle(Py_True));
  return nb::cast<bool>(nb::module_::import_("torch").attr("cuda").attr("is_current_stream_capturing")());
}

nb::object Allocator::make_quickly(const Wanted& wanted) const {
  const nb::tuple shape = shape_of(wanted);
  const nb::tuple strides = strides_of(wanted);
  return call(empty_strided_, std::array{shape.ptr(), strides.ptr(), wanted.dtype.ptr()});
}

nb::object Allocator::make(const Wanted& wanted) const {
  if (empty_strided_.is_valid()) {
    nb::object made = make_quickly(wanted);
    // Made on the current device, which may be another. Checking the tensor costs less than asking torch first.
    if (!place_.on_gpu || find_tensor(made, place_)) return made;
  }
  return as_wanted(wanted, memory_.attr("plain")(stored_shape_of(wanted), wanted.dtype));
}

void Allocator::make_all(std::span<const Wanted> wanted, std::span<nb::object> made) const {
  for (std::size_t i = 0; i < wanted.size(); ++i) made[i] = make(wanted[i]);
}

nb::object Allocator::make_column_major(nb::handle dtype, std::int64_t rows, std::int64_t columns) const {
  constexpr std::int64_t kGranule = 4;
  const std::int64_t stride = (rows + kGranule - 1) / kGranule * kGranule;
  const nb::object memory = make({dtype, {columns, stride}});
  if (!reinterpret_.is_valid()) return memory.attr("t")().attr("narrow")(0, 0, rows);
  const nb::tuple shape = nb::make_tuple(rows, columns);
  const nb::tuple strides = nb::make_tuple(1, std::max<std::int64_t>(stride, 1));
  const nb::object offset = integer(0);
  return call(reinterpret_, std::array{memory.ptr(), shape.ptr(), strides.ptr(), offset.ptr()});
}

nb::object Allocator::view_of_part(const nb::object& tensor, const Wanted& wanted, std::int64_t offset) const {
  const nb::tuple shape = shape_of(wanted);
  const nb::tuple strides = strides_of(wanted);
  const nb::object begin = integer(offset);
  return call(reinterpret_, std::array{tensor.ptr(), shape.ptr(), strides.ptr(), begin.ptr()});
}

void Allocator::make_together(std::span<const Wanted> wanted, std::span<nb::object> made) const {
  for (std::size_t first = 0; first < wanted.size(); ++first) {
    if (made[first].is_valid()) continue;
    const nb::handle dtype = wanted[first].dtype;
    const std::optional<DType> known = find_dtype(dtype);
    std::int64_t num_elements = 0;
    std::size_t num_tensors = 0;
    std::array<std::int64_t, kMostTogether> offsets{};
    const std::int64_t granule = known ? kTogetherBytes / static_cast<std::int64_t>(size_bytes(*known)) : 1;
    for (std::size_t i = first; i < wanted.size(); ++i) {
      if (!wanted[i].dtype.is(dtype)) continue;
      ++num_tensors;
      offsets.at(i) = num_elements;
      num_elements += (num_elements_of(wanted[i]) + granule - 1) / granule * granule;
    }
    const bool together = known && num_tensors > 1 && reinterpret_.is_valid();
    const nb::object memory = together ? make({dtype, {num_elements}, 1}) : nb::object();
    for (std::size_t i = first; i < wanted.size(); ++i) {
      if (!wanted[i].dtype.is(dtype)) continue;
      made[i] = together ? view_of_part(memory, wanted[i], offsets[i]) : make(wanted[i]);
    }
  }
}

nb::object Allocator::first_rows(const nb::object& tensor, const TensorView& first) const {
  if (!reinterpret_.is_valid()) return tensor.attr("narrow")(0, 0, first.extent(0));
  return view_of_part(tensor, {{}, first.shape, first.num_dims}, 0);
}

std::vector<nb::object> Allocator::make_symmetric(std::span<const Wanted> wanted, nb::handle pool_id) const {
  const nb::object device = integer(place_.device);
  const PoolScope scope(begin_pool_, end_pool_, release_pool_, device, pool_id, *pool_);
  std::vector<nb::object> made;
  made.reserve(wanted.size());
  for (const Wanted& one : wanted) made.push_back(make_quickly(one));
  return made;
}

std::optional<DType> Allocator::find_dtype(nb::handle dtype) const {
  if (dtype.is(types_.bf16)) return DType::kBfloat16;
  if (dtype.is(types_.e4m3)) return DType::kFloat8E4M3;
  if (dtype.is(types_.f32)) return DType::kFloat32;
  if (dtype.is(types_.f16)) return DType::kFloat16;
  if (dtype.is(types_.i8)) return DType::kInt8;
  if (dtype.is(types_.i32)) return DType::kInt32;
  if (dtype.is(types_.i64)) return DType::kInt64;
  return std::nullopt;
}

nb::object Allocator::make_symmetric_on_host(const Wanted& wanted) const {
  const std::optional<DType> dtype = find_dtype(wanted.dtype);
  if (!dtype) return {};
  ConstTensorView view;
  view.dtype = *dtype;
  view.num_dims = wanted.num_dims;
  std::int64_t num_elements = 1;
  for (int dim = wanted.num_dims - 1; dim >= 0; --dim) {
    const auto at = static_cast<std::size_t>(dim);
    view.shape[at] = wanted.shape[at];
    view.strides[at] = num_elements;
    num_elements *= wanted.shape[at];
  }
  if (num_elements == 0) return make(wanted);
  Result<Buffer> buffer = [&] {
    const GilReleased released;
    return pool_->allocate(static_cast<std::size_t>(num_elements) * size_bytes(*dtype));
  }();
  const auto owner = std::make_shared<const Buffer>(value_or_raise(std::move(buffer)));
  view.data = owner->data();
  return tensor_on(view, place_, owner, tensor_type_);
}

std::vector<nb::object> Allocator::make_outputs_on_host(std::span<const Wanted> wanted) const {
  std::vector<nb::object> made;
  made.reserve(wanted.size());
  for (const Wanted& one : wanted) {
    nb::object tensor = !one.moves || one.column_major ? make(one) : make_symmetric_on_host(one);
    if (!tensor.is_valid()) return {};
    made.push_back(std::move(tensor));
  }
  return made;
}

std::vector<nb::object> Allocator::make_outputs_quickly(std::span<const Wanted> wanted) const {
  if (wanted.empty()) return {};
  if (place_.on_gpu && empty_strided_.is_valid() && is_capturing_.is_valid() && begin_pool_.is_valid() &&
      end_pool_.is_valid() && release_pool_.is_valid()) {
    static const Name pool_name("pool_id");
    const nb::object pool_id = find_attribute(memory_, pool_name);
    // A graph's replays use the memory of its capture, which only torch's pool for that graph keeps alive.
    if (pool_id.is_valid() && !pool_id.is_none() && !is_capturing()) {
      try {
        std::vector<nb::object> made = make_symmetric(wanted, pool_id);
        if (find_tensor(made.front(), place_)) return made;  // as in make
      } catch (nb::python_error&) {
        // Out of memory, or another thread uses the pool: the caller's slower way frees memory or waits.
      }
    }
  }
  if (!place_.on_gpu && empty_strided_.is_valid()) {
    try {
      if (std::vector<nb::object> made = make_outputs_on_host(wanted); !made.empty()) return made;
    } catch (nb::python_error&) {
      // Out of memory, which the caller's slower way reports; or a torch that imports tensors of fewer types.
    }
  }
  return {};
}

std::vector<nb::object> Allocator::make_outputs(std::span<const Wanted> wanted) const {
  if (std::vector<nb::object> made = make_outputs_quickly(wanted); !made.empty() || wanted.empty()) return made;
  nb::list asked;
  for (const Wanted& one : wanted) asked.append(nb::make_tuple(stored_shape_of(one), one.dtype, one.moves));
  std::vector<nb::object> made;
  for (nb::handle tensor : memory_.attr("outputs_of")(asked)) {
    made.push_back(as_wanted(wanted[made.size()], nb::borrow(tensor)));
  }
  return made;
}

}  // namespace ferry::python
