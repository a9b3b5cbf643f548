#include "errors.hpp"

#include <string>
#include <utility>

namespace ferry::python {
namespace {

/// Error that a signal's handler has raised while this thread waited.
struct Kept {
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* traceback = nullptr;
};
thread_local Kept kept;

/// Keeps the error that Python has set, in place of an earlier one.
void keep_raised() {
  const Kept earlier = std::exchange(kept, {});
  PyErr_Fetch(&kept.type, &kept.value, &kept.traceback);
  Py_XDECREF(earlier.type);
  Py_XDECREF(earlier.value);
  Py_XDECREF(earlier.traceback);
}

}  // namespace

SignalCheck::SignalCheck()
    : main_thread_(
          nanobind::cast<unsigned long>(nanobind::module_::import_("threading").attr("main_thread")().attr("ident"))) {}

bool SignalCheck::is_main_thread() const { return PyThread_get_thread_ident() == main_thread_; }

bool SignalCheck::ask() {
  // Other threads answer no signals. They must not wait for the GIL, which another thread may hold for long.
  if (!is_main_thread()) return false;
  const nanobind::gil_scoped_acquire held;
  is_answering_ = true;
  const bool raised = PyErr_CheckSignals() != 0;
  is_answering_ = false;
  if (!raised) return false;
  keep_raised();
  return true;
}

void SignalCheck::refuse_in_handler(const char* operation) const {
  if (!is_answering_ || !is_main_thread()) return;
  raise(Status(
      ErrorCode::kInvalidArgument,
      std::string(operation) +
          ": called by a signal's handler while a call of the same object waits; have the handler raise, or keep "
          "a note of the signal for the program to read between its calls"));
}

void keep(nanobind::python_error& error) {
  error.restore();
  keep_raised();
}

void raise_kept() {
  if (kept.type == nullptr) return;
  const Kept earlier = std::exchange(kept, {});
  PyErr_Restore(earlier.type, earlier.value, earlier.traceback);
  throw nanobind::python_error();
}

void raise(const Status& status) {
  raise_kept();
  const nanobind::object error =
      nanobind::module_::import_("ferry._errors")
          .attr("from_status")(static_cast<int>(status.code()), std::string(status.message()).c_str(), status.peer());
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nanobind::python_error();
}

}  // namespace ferry::python
