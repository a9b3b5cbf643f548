#ifndef FERRY_PYTHON_OBJECTS_HPP
#define FERRY_PYTHON_OBJECTS_HPP

/// Python objects made and looked into without running Python code.

#include <nanobind/nanobind.h>

namespace ferry::python {

/// An attribute's name. Interned, since looking up by any other string takes several times as long. Made with the GIL
/// held, and never freed.
class Name {
 public:
  explicit Name(const char* text);
  PyObject* ptr() const { return text_; }

 private:
  PyObject* text_;
};

/// Not valid where there is none: no error is left behind.
nanobind::object find_attribute(nanobind::handle owner, const Name& name);

/// @throws nanobind::python_error: there is none
nanobind::object get_attribute(nanobind::handle owner, const Name& name);

/// The torch.dtype of a tensor.
/// @throws nanobind::python_error
nanobind::object dtype_of(nanobind::handle tensor);

/// The object, or None where it is not valid.
nanobind::object or_none(nanobind::object value);

void set_attribute(nanobind::handle owner, const Name& name, nanobind::handle value);

/// An object of a class of Python, without a call of its __init__: its attributes are those of the class.
nanobind::object bare_object(nanobind::handle type);

/// A named tuple of this type.
nanobind::object named_tuple(nanobind::handle type, const nanobind::tuple& values);

}  // namespace ferry::python

#endif  // FERRY_PYTHON_OBJECTS_HPP
