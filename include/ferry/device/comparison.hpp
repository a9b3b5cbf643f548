#ifndef FERRY_DEVICE_COMPARISON_HPP
#define FERRY_DEVICE_COMPARISON_HPP

/// Comparisons of `wait_until`, as hosts and kernels evaluate them.

#include <cstdint>

#include "ferry/device/host_device.hpp"
#include "ferry/one_sided.hpp"

namespace ferry::device {

/// Whether the word, as an unsigned number, compares with the value in this way.
FERRY_HOST_DEVICE constexpr bool compares(std::uint64_t word, Comparison comparison, std::uint64_t value) {
  switch (comparison) {
    case Comparison::kEqual:
      return word == value;
    case Comparison::kNotEqual:
      return word != value;
    case Comparison::kGreater:
      return word > value;
    case Comparison::kGreaterEqual:
      return word >= value;
    case Comparison::kLess:
      return word < value;
    case Comparison::kLessEqual:
      return word <= value;
  }
  return false;
}

}  // namespace ferry::device

#endif  // FERRY_DEVICE_COMPARISON_HPP
