#ifndef FERRY_PYTHON_GIL_HPP
#define FERRY_PYTHON_GIL_HPP

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace ferry::python {

/// Scope in which this thread does not hold the GIL.
///
/// Once Python shuts down, versions before 3.14 end each other thread that asks for the GIL, and unwind its stack.
/// Destructors and nanobind's functions cannot be unwound, so the process of a program that ended well would abort.
/// Such a thread waits here for the end of the process instead, as it does in later versions. It holds no lock of a
/// group: the call is over.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    try {
      PyEval_RestoreThread(state_);
    } catch (const abi::__forced_unwind&) {
      for (;;) pause();
    }
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace ferry::python

#endif  // FERRY_PYTHON_GIL_HPP
