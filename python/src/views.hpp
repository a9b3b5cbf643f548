#ifndef FERRY_PYTHON_VIEWS_HPP
#define FERRY_PYTHON_VIEWS_HPP

/// Conversion of tensors between Python and the library. Python passes tensors, or where those cannot be read in place,
/// tuples (address, dtype, shape, strides), so that this module does not depend on torch; the library returns them
/// through DLPack.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>

#include "ferry/placement.hpp"
#include "ferry/types.hpp"
#include "tensors.hpp"

namespace ferry::python {

// DLDataTypeCode.
inline constexpr std::uint8_t kDLInt = 0;
inline constexpr std::uint8_t kDLUInt = 1;
inline constexpr std::uint8_t kDLFloat = 2;
inline constexpr std::uint8_t kDLBfloat = 4;
inline constexpr std::uint8_t kDLBool = 6;
inline constexpr std::uint8_t kDLFloat8E4M3FN = 10;

/// None is an absent view.
/// @throws BadTensor: see read_tensor; nanobind::value_error: a tuple with more dimensions than a view has
TensorView view_of(nanobind::handle tensor, Place place);

/// A placement that may be none, with its table on the GPU or None.
Placement placement_of(const Placement* placement, nanobind::handle table, Place place);
/// None, or three counters: logical, physical, received.
LoadCounters counters_of(nanobind::handle counters, Place place);

/// Bytes for kUint8 and bool.
nanobind::dlpack::dtype dlpack_dtype(DType dtype);

/// An array on memory that lives as long as `owner`; absent views are None.
nanobind::object array_of(const ConstTensorView& view, Place place, nanobind::handle owner);
nanobind::object bytes_array(void* data, std::size_t num_bytes, Place place, nanobind::handle owner);

}  // namespace ferry::python

#endif  // FERRY_PYTHON_VIEWS_HPP
