#ifndef FERRY_PYTHON_PLACED_HPP
#define FERRY_PYTHON_PLACED_HPP

#include "ferry/group.hpp"
#include "tensors.hpp"

namespace ferry::python {

/// A Routing, and the device of the memory that holds its tables.
struct PlacedRouting {
  Routing routing{};
  Place place{};
};

struct PlacedBuffer {
  Buffer buffer{};
  Place place{};
};

}  // namespace ferry::python

#endif  // FERRY_PYTHON_PLACED_HPP
