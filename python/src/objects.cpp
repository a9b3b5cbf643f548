#include "objects.hpp"

#include <utility>

namespace nb = nanobind;

namespace ferry::python {
namespace {

nb::object made(PyObject* object) {
  if (object == nullptr) nb::raise_python_error();
  return nb::steal(object);
}

/// The type's tp_new. The stable ABI hides the fields of types.
newfunc constructor_of(PyTypeObject* type) { return reinterpret_cast<newfunc>(PyType_GetSlot(type, Py_tp_new)); }

}  // namespace

Name::Name(const char* text) : text_(PyUnicode_InternFromString(text)) {
  if (text_ == nullptr) nb::raise_python_error();
}

nb::object find_attribute(nb::handle owner, const Name& name) {
  PyObject* value = PyObject_GetAttr(owner.ptr(), name.ptr());
  if (value == nullptr) PyErr_Clear();
  return nb::steal(value);
}

nb::object get_attribute(nb::handle owner, const Name& name) { return made(PyObject_GetAttr(owner.ptr(), name.ptr())); }

nb::object dtype_of(nb::handle tensor) {
  static const Name name("dtype");
  return get_attribute(tensor, name);
}

nb::object or_none(nb::object value) { return value.is_valid() ? std::move(value) : nb::none(); }

void set_attribute(nb::handle owner, const Name& name, nb::handle value) {
  if (PyObject_SetAttr(owner.ptr(), name.ptr(), value.ptr()) != 0) nb::raise_python_error();
}

nb::object bare_object(nb::handle type) {
  auto* const of = reinterpret_cast<PyTypeObject*>(type.ptr());
  static PyObject* const nothing = PyTuple_New(0);
  return made(constructor_of(of)(of, nothing, nullptr));
}

nb::object named_tuple(nb::handle type, const nb::tuple& values) {
  static const newfunc construct = constructor_of(&PyTuple_Type);
  const nb::tuple arguments = nb::make_tuple(values);
  return made(construct(reinterpret_cast<PyTypeObject*>(type.ptr()), arguments.ptr(), nullptr));
}

}  // namespace ferry::python
