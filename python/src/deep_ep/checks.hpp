#ifndef FERRY_PYTHON_DEEP_EP_CHECKS_HPP
#define FERRY_PYTHON_DEEP_EP_CHECKS_HPP

/// Arguments of deep_ep's calls, read and checked. A wrong one raises ferry.InvalidArgument; texts begin with
/// "operation: name".

#include <nanobind/nanobind.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "calls.hpp"
#include "ferry/routing.hpp"
#include "objects.hpp"

namespace ferry::python::deep_ep {

/// Required size of a dimension, or any size, with its letter in error texts.
struct Extent {
  Extent(std::int64_t number) : size(number) {}
  Extent(const char* name) : letter(name) {}
  std::int64_t size = -1;
  const char* letter = nullptr;
};

/// Rows, or (rows, scales [T, S]). Scales of one dimension are read as S = 1.
struct Payload {
  nanobind::object rows{}, scales{};
  TensorView rows_view{}, scales_view{};
  bool has_scales = false;
  bool scales_have_one_dim = false;
};

/// Payload that was received, in the form in which `sent` was given.
nanobind::object payload_of(Received& received, const Payload& sent);

struct Choice {
  TensorView ids{}, weights{};  ///< weights: absent if None was given
};

/// An integer of any library; -1 for anything else and for values of more than 64 bits.
std::int64_t index_of(nanobind::handle value);

/// Object that deep_ep attached to the storage of a tensor under this name; not valid if there is none.
nanobind::object find_link(nanobind::handle tensor, const Name& name);
void attach_link(nanobind::handle tensor, const Name& name, nanobind::handle link);

/// Whether a ferry.Routing is one of `group` (a ferry.Group).
bool is_of_group(nanobind::handle routing, nanobind::handle group);

/// Whether it is a tensor on the device of `calls`, of any dtype and shape.
bool is_tensor_of(const Calls& calls, nanobind::handle value);

/// Whether it is a tuple or a list.
bool is_sequence(nanobind::handle value);

class Checks {
 public:
  Checks(const Calls& calls, const char* operation) : calls_(calls), operation_(operation) {}

  /// Raises ferry.InvalidArgument: "operation: text".
  [[noreturn]] void refuse(const std::string& text) const;

  /// A tensor on the buffer's device.
  void tensor(nanobind::handle tensor, const std::string& name) const;
  /// A contiguous tensor of this dtype and shape. Tables of `bool` are of dtype kUint8.
  TensorView table(nanobind::handle tensor, const char* name, DType dtype, std::initializer_list<Extent> shape,
                   bool is_bool = false) const;
  TensorView table_or_none(nanobind::handle tensor, const char* name, DType dtype,
                           std::initializer_list<Extent> shape) const;
  /// Contiguous rows [T, H] of multiples of 16 bytes.
  TensorView rows(nanobind::handle tensor, const char* name, std::optional<DType> dtype = {}) const;
  Payload payload(nanobind::handle x) const;
  /// Ids [num_tokens, K] of dtype `ids` and their weights or None.
  Choice choice(nanobind::handle topk_idx, nanobind::handle topk_weights, std::int64_t num_tokens, DType ids) const;
  /// None, a tensor, or an iterable of up to two tensors [num_tokens, hidden] bf16. -> a list of them, which has to
  /// live as long as `in`: those of an iterator have no other owner
  nanobind::list biases(nanobind::handle bias, std::int64_t num_tokens, std::int64_t hidden, CombineInput& in) const;
  /// E, a multiple of the number of ranks.
  std::int64_t num_experts(nanobind::handle value) const;
  std::int64_t num_experts(std::int64_t number, const std::string& shown) const;
  /// An integer of at least 1.
  std::int64_t size(nanobind::handle value, const char* name) const;
  TensorView expert_stats(nanobind::handle stats, std::int64_t num_local) const;
  TensorView wait_stats(nanobind::handle stats, const char* name) const;

 private:
  std::string what(const char* name) const { return std::string(operation_) + ": " + name; }
  void dtype(nanobind::handle tensor, const std::string& name, DType dtype, bool is_bool = false) const;
  void contiguous(nanobind::handle tensor, const std::string& name) const;
  [[noreturn]] void refuse_table(nanobind::handle tensor, const char* name, DType dtype,
                                 std::initializer_list<Extent> shape, bool is_bool) const;
  [[noreturn]] void refuse_rows(nanobind::handle tensor, const char* name, std::optional<DType> dtype) const;

  const Calls& calls_;
  const char* operation_;
};

}  // namespace ferry::python::deep_ep

#endif  // FERRY_PYTHON_DEEP_EP_CHECKS_HPP
