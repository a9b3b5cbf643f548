#ifndef FERRY_PYTHON_VIEWS_HPP
#define FERRY_PYTHON_VIEWS_HPP

/// Memory of the library as DLPack arrays, which Python turns into tensors.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>

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

/// Bytes for kUint8 and bool.
nanobind::dlpack::dtype dlpack_dtype(DType dtype);

/// An array on memory that lives as long as `owner`; absent views are None.
nanobind::object array_of(const ConstTensorView& view, Place place, nanobind::handle owner);
nanobind::object bytes_array(void* data, std::size_t num_bytes, Place place, nanobind::handle owner);

}  // namespace ferry::python

#endif  // FERRY_PYTHON_VIEWS_HPP
