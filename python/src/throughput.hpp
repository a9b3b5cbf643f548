#ifndef FERRY_PYTHON_THROUGHPUT_HPP
#define FERRY_PYTHON_THROUGHPUT_HPP

/// The calls of deep_ep.Buffer, each in one step, as `Calls` makes those of a group: None for all but the common case,
/// before anything was done.

#include <nanobind/nanobind.h>

namespace ferry::python {

void define_throughput(nanobind::module_& module);

}  // namespace ferry::python

#endif  // FERRY_PYTHON_THROUGHPUT_HPP
