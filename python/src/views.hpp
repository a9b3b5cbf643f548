#ifndef FERRY_PYTHON_VIEWS_HPP
#define FERRY_PYTHON_VIEWS_HPP

/// Conversion of tensors between Python and the library. Python passes them as tuples (address, dtype, shape, strides),
/// so that this module does not depend on torch; the library returns them through DLPack.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "ferry/types.hpp"

namespace ferry::python {

/// None is an absent view.
/// @throws nanobind::value_error: more dimensions than a view has
TensorView view_of(nanobind::handle tensor);

/// Device of a group's memory.
struct Place {
  bool on_gpu = false;
  int device = 0;
};

/// An array on memory that lives as long as `owner`; absent views are None.
nanobind::object array_of(const ConstTensorView& view, Place place, nanobind::handle owner);
nanobind::object bytes_array(void* data, std::size_t num_bytes, Place place, nanobind::handle owner);

}  // namespace ferry::python

#endif  // FERRY_PYTHON_VIEWS_HPP
