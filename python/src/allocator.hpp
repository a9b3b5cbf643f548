#ifndef FERRY_PYTHON_ALLOCATOR_HPP
#define FERRY_PYTHON_ALLOCATOR_HPP

/// New torch tensors for the outputs of calls, made through functions of torch that Python hands over, so that this
/// module still links nothing of torch. They are ordinary tensors of torch's own allocator: memory that was imported
/// through DLPack would ignore `record_stream`.

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "symmetric_pool.hpp"
#include "tensors.hpp"

namespace ferry::python {

/// A tensor to make: up to three dimensions, contiguous.
struct Wanted {
  nanobind::handle dtype{};  ///< a torch.dtype
  std::array<std::int64_t, kMaxTensorDims> shape{};
  int num_dims = 2;
  bool moves = false;         ///< holds payload rows, which gain from symmetric memory
  bool column_major = false;  ///< of three dimensions: the last two are transposed in memory
};

/// The dtypes of tables and of rows.
struct TableTypes {
  nanobind::object i32, i64, f32, boolean, e4m3, i8, bf16, f16;
};

/// Every member function needs the GIL.
class Allocator {
 public:
  /// memory: a ferry._memory.HostMemory or DeviceMemory.
  Allocator(nanobind::object memory, std::shared_ptr<SymmetricPool> pool, Place place);

  const TableTypes& types() const { return types_; }

  /// torch's current stream. Empty where this torch has no function for it.
  std::optional<Stream> stream() const { return work_stream(tensor_type_, place_); }

  /// Whether a graph captures that stream.
  bool is_capturing() const;

  /// The same, by torch's Python functions where it is empty.
  Stream any_stream() const;

  /// torch.Tensor
  nanobind::handle tensor_type() const { return tensor_type_; }

  /// An ordinary tensor.
  /// @throws nanobind::python_error: torch's, out of memory for example
  nanobind::object make(const Wanted& wanted) const;

  /// One ordinary tensor for each wanted.
  /// @throws nanobind::python_error
  void make_all(std::span<const Wanted> wanted, std::span<nanobind::object> made) const;

  /// An ordinary tensor [rows, columns] with strides (1, rows rounded up to 4).
  /// @throws nanobind::python_error
  nanobind::object make_column_major(nanobind::handle dtype, std::int64_t rows, std::int64_t columns) const;

  /// Small ordinary tensors that are used together. Those of one dtype are views of one allocation, which cost less
  /// than tensors of their own.
  /// @throws nanobind::python_error
  void make_together(std::span<const Wanted> wanted, std::span<nanobind::object> made) const;

  /// View of the first rows of a contiguous tensor, of the shape of `first`.
  /// @throws nanobind::python_error
  nanobind::object first_rows(const nanobind::object& tensor, const TensorView& first) const;

  /// The outputs of a dispatch, which peers write: on a GPU all in symmetric memory, on the host those that hold
  /// payload.
  /// @throws nanobind::python_error
  std::vector<nanobind::object> make_outputs(std::span<const Wanted> wanted) const;
  /// The same, empty if memory would have to be taken for them, or if this torch lacks the functions.
  /// @throws nanobind::python_error
  std::vector<nanobind::object> make_outputs_quickly(std::span<const Wanted> wanted) const;

 private:
  /// The DType of a torch.dtype, if this module itself can make tensors of it.
  std::optional<DType> find_dtype(nanobind::handle dtype) const;
  /// Symmetric memory on the host. Not valid for types that this module does not support.
  nanobind::object make_symmetric_on_host(const Wanted& wanted) const;
  /// Empty if any of them cannot be made here.
  std::vector<nanobind::object> make_outputs_on_host(std::span<const Wanted> wanted) const;
  nanobind::object make_quickly(const Wanted& wanted) const;
  /// Part of a contiguous tensor of the same dtype, from the element `offset` on.
  nanobind::object view_of_part(const nanobind::object& tensor, const Wanted& wanted, std::int64_t offset) const;
  std::vector<nanobind::object> make_symmetric(std::span<const Wanted> wanted, nanobind::handle pool_id) const;

  nanobind::object memory_;
  std::shared_ptr<SymmetricPool> pool_;
  Place place_;
  nanobind::object tensor_type_;
  TableTypes types_;
  /// Functions of torch, null where this torch does not have them. `empty_strided_` makes tensors on torch's current
  /// device.
  nanobind::object empty_strided_, reinterpret_, is_capturing_, begin_pool_, end_pool_, release_pool_;
};

}  // namespace ferry::python

#endif  // FERRY_PYTHON_ALLOCATOR_HPP
