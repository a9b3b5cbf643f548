#include "errors.hpp"

#include <string>
#include <utility>

namespace ferry::python {
namespace {

/// What a signal's handler has raised while this thread waited.
struct Raised {
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* traceback = nullptr;
};
thread_local Raised raised;

}  // namespace

std::function<bool()> signal_check() {
  const auto main_thread =
      nanobind::cast<unsigned long>(nanobind::module_::import_("threading").attr("main_thread")().attr("ident"));
  return [main_thread] {
    // Other threads answer no signals, and need not wait for the GIL, which somebody may hold for long.
    if (PyThread_get_thread_ident() != main_thread) return false;
    const nanobind::gil_scoped_acquire held;
    if (PyErr_CheckSignals() == 0) return false;
    PyErr_Fetch(&raised.type, &raised.value, &raised.traceback);
    return true;
  };
}

void raise(const Status& status) {
  if (raised.type != nullptr) {
    const Raised earlier = std::exchange(raised, {});
    PyErr_Restore(earlier.type, earlier.value, earlier.traceback);
    throw nanobind::python_error();
  }
  const nanobind::object error =
      nanobind::module_::import_("ferry._errors")
          .attr("from_status")(static_cast<int>(status.code()), std::string(status.message()).c_str(), status.peer());
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nanobind::python_error();
}

}  // namespace ferry::python
