#ifndef FERRY_PYTHON_BALANCE_HPP
#define FERRY_PYTHON_BALANCE_HPP

/// Placing experts by their load, without a group.

#include <nanobind/nanobind.h>

namespace ferry::python {

void define_balance(nanobind::module_& module);

}  // namespace ferry::python

#endif  // FERRY_PYTHON_BALANCE_HPP
