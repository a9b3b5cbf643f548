#include "errors.hpp"

#include <string>

namespace ferry::python {

void raise(const Status& status) {
  const nanobind::object error =
      nanobind::module_::import_("ferry._errors")
          .attr("from_status")(static_cast<int>(status.code()), std::string(status.message()).c_str(), status.peer());
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nanobind::python_error();
}

}  // namespace ferry::python
