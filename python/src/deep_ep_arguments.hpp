#ifndef FERRY_PYTHON_DEEP_EP_ARGUMENTS_HPP
#define FERRY_PYTHON_DEEP_EP_ARGUMENTS_HPP

/// Arguments of deep_ep's calls, as the package checks them. What is not found is not a common, valid case.

#include <nanobind/nanobind.h>

#include <cstdint>
#include <initializer_list>
#include <optional>

#include "calls.hpp"
#include "objects.hpp"

namespace ferry::python {

/// Stands for any size in a shape.
constexpr std::int64_t kAny = -1;

/// A contiguous tensor of this dtype and shape. Tables of `bool` are of dtype kUint8.
std::optional<TensorView> find_table(nanobind::handle tensor, Place place, DType dtype,
                                     std::initializer_list<std::int64_t> shape, bool is_bool = false);

/// Contiguous rows [any, H] of multiples of 16 bytes.
std::optional<TensorView> find_rows(nanobind::handle tensor, Place place);

/// Rows, or (rows, scales [T, S]).
struct Payload {
  nanobind::object rows{}, scales{};
  TensorView rows_view{}, scales_view{};
};

/// Rows are contiguous, of multiples of 16 bytes; scales have two dimensions and any strides.
std::optional<Payload> find_payload(nanobind::handle x, Place place);

/// In the form in which payload was given.
nanobind::object payload_of(Received& received);

std::optional<std::int64_t> find_integer(nanobind::handle value);

/// What deep_ep attached to the storage of a tensor under this name, empty if nothing.
nanobind::object find_link(nanobind::handle tensor, const Name& name);

/// The native routing of a ferry.Routing of `group` (a ferry.Group), which keeps it; null if it is none.
const PlacedRouting* find_routing(nanobind::handle routing, nanobind::handle group);

/// A combine of bf16 rows with `routing`: x [N, H], weights [N, K] or None, bias None, [T, H], or up to two of them.
/// by_expert: x [any, H], weights [as many] or None, which are not what a combine takes yet.
std::optional<ReadCombine> find_combine(const Calls& calls, const Routing& routing, nanobind::handle x,
                                        nanobind::handle topk_weights, nanobind::handle bias, bool by_expert = false);

/// Raises what calls so far went wrong with, as far as it is known.
void raise_known_errors(const Calls& calls);

}  // namespace ferry::python

#endif  // FERRY_PYTHON_DEEP_EP_ARGUMENTS_HPP
