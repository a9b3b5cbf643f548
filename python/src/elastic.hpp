#ifndef FERRY_PYTHON_ELASTIC_HPP
#define FERRY_PYTHON_ELASTIC_HPP

/// The calls of deep_ep.ElasticBuffer, as throughput.hpp makes those of deep_ep.Buffer.

#include <nanobind/nanobind.h>

namespace ferry::python {

void define_elastic(nanobind::module_& module);

}  // namespace ferry::python

#endif  // FERRY_PYTHON_ELASTIC_HPP
