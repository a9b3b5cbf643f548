#ifndef FERRY_PYTHON_ERRORS_HPP
#define FERRY_PYTHON_ERRORS_HPP

#include <nanobind/nanobind.h>

#include <functional>
#include <utility>

#include "ferry/status.hpp"

namespace ferry::python {

/// Raises the exception of ferry._errors for a failure. Needs the GIL.
[[noreturn]] void raise(const Status& status);

/// GroupOptions::interrupted of a group that is made by Python: runs the handlers of signals that have come, if the
/// thread that waits is the one in which Python does that. True if a handler raised something, which the next raise()
/// of this thread raises in place of its Status. Needs the GIL; what it returns takes it.
std::function<bool()> signal_check();

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
