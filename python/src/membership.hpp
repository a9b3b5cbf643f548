#ifndef FERRY_PYTHON_MEMBERSHIP_HPP
#define FERRY_PYTHON_MEMBERSHIP_HPP

/// The ranks of a program as a set that changes.

#include <nanobind/nanobind.h>

namespace ferry::python {

void define_membership(nanobind::module_& module);

}  // namespace ferry::python

#endif  // FERRY_PYTHON_MEMBERSHIP_HPP
