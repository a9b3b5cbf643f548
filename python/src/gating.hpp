#ifndef FERRY_PYTHON_GATING_HPP
#define FERRY_PYTHON_GATING_HPP

#include <nanobind/nanobind.h>

namespace ferry::python {

/// select_experts and gating_presets, whose options are tuples of all members in order, enumerators as numbers.
void define_gating(nanobind::module_& module);

}  // namespace ferry::python

#endif  // FERRY_PYTHON_GATING_HPP
