#ifndef FERRY_PYTHON_ERRORS_HPP
#define FERRY_PYTHON_ERRORS_HPP

#include <nanobind/nanobind.h>

#include <utility>

#include "ferry/status.hpp"

namespace ferry::python {

/// Raises the exception of ferry._errors for a failure. Needs the GIL.
[[noreturn]] void raise(const Status& status);

inline void raise_if_error(const Status& status) {
  if (!status.ok()) raise(status);
}

template <typename T>
T value_or_raise(Result<T> result) {
  if (!result.ok()) raise(result.status());
  return std::move(*result);
}

}  // namespace ferry::python

#endif  // FERRY_PYTHON_ERRORS_HPP
