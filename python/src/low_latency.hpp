#ifndef FERRY_PYTHON_LOW_LATENCY_HPP
#define FERRY_PYTHON_LOW_LATENCY_HPP

/// The calls of deep_ep.Buffer in latency mode, each in one step: None for all but the common, valid case, before
/// anything was done.

#include <nanobind/nanobind.h>

namespace ferry::python {

void define_low_latency(nanobind::module_& module);

}  // namespace ferry::python

#endif  // FERRY_PYTHON_LOW_LATENCY_HPP
