#ifndef FERRY_PYTHON_LATENCY_HPP
#define FERRY_PYTHON_LATENCY_HPP

/// Calls of latency mode on tensors, each in one step: reading tensors, allocating outputs, asking for the stream.
/// BadTensor, like a TypeError of arguments, means that nothing was done; any other exception is known to all ranks.

#include <nanobind/nanobind.h>

namespace ferry::python {

void define_latency(nanobind::module_& module);

}  // namespace ferry::python

#endif  // FERRY_PYTHON_LATENCY_HPP
