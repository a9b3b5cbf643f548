#ifndef FERRY_PYTHON_ERRORS_HPP
#define FERRY_PYTHON_ERRORS_HPP

#include <nanobind/nanobind.h>

#include <utility>

#include "ferry/status.hpp"

namespace ferry::python {

/// Raises the exception of ferry._errors for a failure. Needs the GIL.
[[noreturn]] void raise(const Status& status);

/// Answer of Python to GroupOptions::interrupted and BalanceOptions::interrupted.
class SignalCheck {
 public:
  /// Needs the GIL.
  SignalCheck();
  /// Runs the handlers of pending signals if the waiting thread is Python's main thread, as no other runs them. True if
  /// a handler raised an error: it is kept for raise_kept(). Takes the GIL.
  bool ask();
  /// Raises InvalidArgument where a handler asks for `operation` while ask() runs it. Needs the GIL.
  void refuse_in_handler(const char* operation) const;

 private:
  bool is_main_thread() const;

  unsigned long main_thread_;
  bool is_answering_ = false;  // guarded by the GIL
};

/// Keeps an error that is no Exception, such as KeyboardInterrupt, for raise_kept(). Needs the GIL.
void keep(nanobind::python_error& error);

/// Raises the error that a signal's handler raised while this thread waited, if there is one. raise() raises it in
/// place of its Status. Code that drops the Status of a call that may have waited has to call this. Needs the GIL.
void raise_kept();

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
