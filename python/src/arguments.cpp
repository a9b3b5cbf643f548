#include "arguments.hpp"

#include <nanobind/stl/string.h>

#include <cmath>
#include <limits>
#include <optional>

#include "errors.hpp"
#include "objects.hpp"

namespace nb = nanobind;

namespace ferry::python {
namespace {

constexpr std::int64_t kMost32 = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kMost64 = std::numeric_limits<std::int64_t>::max();

std::string text_of(PyObject* made) {
  if (made == nullptr) nb::raise_python_error();
  return nb::cast<std::string>(nb::steal(made));
}

/// int(value); not valid if the value is no number, or a float whose fraction would be lost without a word. Leaves no
/// Python error behind in that case.
nb::object integer_of(nb::handle value) {
  if (PyFloat_Check(value.ptr()) != 0) {
    const double number = PyFloat_AsDouble(value.ptr());
    if (std::trunc(number) != number) return {};
  }
  PyObject* number = PyNumber_Long(value.ptr());
  if (number != nullptr) return nb::steal(number);
  if (PyErr_ExceptionMatches(PyExc_TypeError) == 0 && PyErr_ExceptionMatches(PyExc_ValueError) == 0 &&
      PyErr_ExceptionMatches(PyExc_OverflowError) == 0) {
    nb::raise_python_error();
  }
  PyErr_Clear();
  return {};
}

/// int(value), from -most to most.
std::int64_t whole_below(std::int64_t most, nb::handle value, const char* operation, const char* name) {
  const nb::object number = PyLong_CheckExact(value.ptr()) ? nb::borrow(value) : integer_of(value);
  int overflow = 0;
  const long long result = number.is_valid() ? PyLong_AsLongLongAndOverflow(number.ptr(), &overflow) : 0;
  if (number.is_valid() && overflow == 0 && result <= most && result >= -most) return result;
  const std::string what = std::string(operation) + ": " + name + " is ";
  if (!number.is_valid()) refuse(what + repr_of(value) + ", expected an integer");
  refuse(what + repr_of(number) + ", expected less than 2**" + (most == kMost32 ? "31" : "63"));
}

std::string device_text(Place place) { return place.on_gpu ? "cuda:" + std::to_string(place.device) : "cpu"; }

}  // namespace

void refuse(const std::string& message) { raise(Status(ErrorCode::kInvalidArgument, message)); }

std::string class_name(nb::handle value) {
  return nb::cast<std::string>(nb::handle(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr()))).attr("__name__"));
}

std::string repr_of(nb::handle value) { return text_of(PyObject_Repr(value.ptr())); }

void refuse_unreadable(nb::handle tensor, Place place, const std::string& what) {
  refuse(nb::cast<std::string>(
      nb::module_::import_("ferry._tensors").attr("why_unreadable")(tensor, what, device_text(place))));
}

TensorView view_of(nb::handle tensor, Place place, const char* operation, const char* name) {
  if (tensor.is_none()) return {};
  const std::optional<ReadTensor> read = find_tensor(tensor, place);
  if (!read) refuse_unreadable(tensor, place, std::string(operation) + ": " + name);
  return read->view;
}

std::int64_t whole(nb::handle value, const char* operation, const char* name) {
  return whole_below(kMost64, value, operation, name);
}

int whole_32(nb::handle value, const char* operation, const char* name) {
  return static_cast<int>(whole_below(kMost32, value, operation, name));
}

std::vector<std::int32_t> owners_of(nb::handle expert_to_rank, const char* operation) {
  std::vector<std::int32_t> owners;
  if (expert_to_rank.is_none()) return owners;
  const std::string what = std::string(operation) + ": expert_to_rank";
  nb::list entries;
  try {
    PyObject* const list = PySequence_List(expert_to_rank.ptr());
    if (list == nullptr) nb::raise_python_error();
    entries = nb::steal<nb::list>(list);
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_TypeError) && !error.matches(PyExc_ValueError) && !error.matches(PyExc_OverflowError)) {
      throw;
    }
    refuse(what + ": expected the rank of each expert; " + text_of(PyObject_Str(error.value().ptr())));
  }
  owners.reserve(entries.size());
  for (const nb::handle entry : entries) {
    const nb::object number = integer_of(entry);
    if (!number.is_valid()) {
      refuse(what + "[" + std::to_string(owners.size()) + "] is " + repr_of(entry) + ", expected a rank");
    }
    int overflow = 0;
    const long long owner = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    if (overflow != 0 || owner > kMost32 || owner < -kMost32) {
      refuse(what + "[" + std::to_string(owners.size()) + "] is " + repr_of(number) + ", expected less than 2**31");
    }
    owners.push_back(static_cast<std::int32_t>(owner));
  }
  return owners;
}

Load load_of(nb::handle placement, nb::handle counters, const LoadTypes& types, Place place, const char* operation) {
  static const Name native_name("_native");
  static const Name table_name("_table");
  Load load;
  if (placement.is_none() && counters.is_none()) return load;
  const std::string what = std::string(operation) + ": ";
  if (!placement.is_none() && !nb::isinstance(placement, types.placement)) {
    refuse(what + "placement is a " + class_name(placement) + ", expected a ferry.Placement");
  }
  if (!counters.is_none()) {
    if (!nb::isinstance(counters, types.counters)) {
      refuse(what + "counters is a " + class_name(counters) + ", expected ferry.LoadCounters");
    }
    const auto tensors = nb::cast<nb::tuple>(counters);
    load.counters = {view_of(tensors[0], place, operation, "counters.logical"),
                     view_of(tensors[1], place, operation, "counters.physical"),
                     view_of(tensors[2], place, operation, "counters.received"),
                     view_of(tensors[3], place, operation, "counters.homeless")};
  }
  if (!placement.is_none()) {
    load.placement = nb::cast<const Placement&>(get_attribute(placement, native_name));
    load.placement.physical_to_logical_view =
        view_of(get_attribute(placement, table_name), place, operation, "placement.physical_to_logical");
  }
  return load;
}

bool ends_call(const nb::python_error& error) { return error.matches(PyExc_Exception); }

}  // namespace ferry::python
