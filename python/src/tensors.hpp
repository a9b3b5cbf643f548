#ifndef FERRY_PYTHON_TENSORS_HPP
#define FERRY_PYTHON_TENSORS_HPP

/// Tensors of Python read in place, without a Python call: through the table of C functions that a tensor type
/// publishes for DLPack consumers (DLPack 1.3, DLPackExchangeAPI; torch from 2.10 on). This module still links nothing
/// of torch.

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>

#include "ferry/types.hpp"

namespace ferry::python {

/// Device of a group's memory.
struct Place {
  bool on_gpu = false;
  int device = 0;
};

/// A tensor that cannot be read this way: no tensor, on another device, of another dtype, or of a type without such a
/// table.
class BadTensor : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A tensor as it was read. A view of `bool` has the dtype kUint8.
struct ReadTensor {
  TensorView view{};
  bool is_bool = false;
};

/// A tensor in memory of `place`. Empty where `read_tensor` throws; never leaves a Python error behind.
std::optional<ReadTensor> find_tensor(nanobind::handle tensor, Place place);

/// The view of a tensor that this module has made, or has checked, in memory of `place`.
/// @throws BadTensor
TensorView read_tensor(nanobind::handle tensor, Place place);

/// A tensor of `type` (torch.Tensor) on memory that `owner` keeps.
/// @throws nanobind::python_error
nanobind::object tensor_on(const ConstTensorView& view, Place place, std::shared_ptr<const void> owner,
                           nanobind::handle type);

/// Whether the elements are in row-major order without gaps.
bool is_contiguous(const TensorView& view);

/// Current stream, on a GPU, of the library that tensors of this type belong to; null on the host. Empty if the type
/// has no function for it.
std::optional<Stream> work_stream(nanobind::handle type, Place place);

}  // namespace ferry::python

#endif  // FERRY_PYTHON_TENSORS_HPP
