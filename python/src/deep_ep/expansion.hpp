#ifndef FERRY_PYTHON_DEEP_EP_EXPANSION_HPP
#define FERRY_PYTHON_DEEP_EP_EXPANSION_HPP

/// Rows of a dispatch by token turned into rows by expert, and back before a combine, with their outputs.

#include <nanobind/nanobind.h>

#include <cstdint>

#include "calls.hpp"
#include "ferry/expansion.hpp"

namespace ferry::python::deep_ep {

/// Copies of each row by an expanded handle.
struct SlotViews {
  ConstTensorView slots{};       ///< [N, K] i32
  ConstTensorView last_equal{};  ///< [N, K] i8, or absent
};

/// metadata: [N, 2 + K] i32.
SlotViews slots_of(const TensorView& metadata, const TensorView& last_equal);

/// The largest row that a slot names, -1 if there is none. For tables on the host.
std::int64_t largest_slot(const ConstTensorView& slots);

struct ExpandedForm {
  std::int64_t num_rows = 0;  ///< by expert
  bool zero_padding = false;
  bool column_major_scales = false;
};

/// by_token: rows that a dispatch has received; their ids are not used.
/// @throws nanobind::python_error, and errors that ferry reports
Received expand(const Calls& calls, const Received& by_token, const SlotViews& slots, const ExpandedForm& form,
                Stream stream);

/// Rows by token, for a combine.
struct Reduced {
  nanobind::object x, weights;  ///< weights: not valid without
  TensorView x_view{}, weights_view{};
};

/// exact: the sums are f32, else bf16.
/// @throws as expand
Reduced reduce(const Calls& calls, const ReduceInput& in, bool exact, Stream stream);

}  // namespace ferry::python::deep_ep

#endif  // FERRY_PYTHON_DEEP_EP_EXPANSION_HPP
