#ifndef FERRY_PYTHON_TENSORS_HPP
#define FERRY_PYTHON_TENSORS_HPP

/// Tensors of Python read in place, without a Python call: through the table of C functions that a tensor type
/// publishes for DLPack consumers (DLPack 1.3, DLPackExchangeAPI; torch from 2.10 on). This module still links nothing
/// of torch.

#include <nanobind/nanobind.h>

#include <stdexcept>

#include "ferry/types.hpp"

namespace ferry::python {

/// Device of a group's memory.
struct Place {
  bool on_gpu = false;
  int device = 0;
};

/// A tensor that cannot be read this way: no tensor, on another device, of another dtype, without memory, or of a type
/// without such a table. Becomes `ferry._native.BadTensor`, and the caller finds out which it is.
class BadTensor : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The view of a tensor in memory of `place`.
/// @throws BadTensor
TensorView read_tensor(nanobind::handle tensor, Place place);

}  // namespace ferry::python

#endif  // FERRY_PYTHON_TENSORS_HPP
