#ifndef FERRY_PLAN_CARVER_HPP
#define FERRY_PLAN_CARVER_HPP

/// Layouts whose sizes and pointers are computed by the same code: a layout takes its parts from a Carver in order.
/// With a null base this yields the byte count, with a real base the pointers.

#include <cstddef>
#include <cstdint>

#include "plan/host_device.hpp"

namespace ferry::plan {

/// Alignment of parts: a cache line, so that parts of different writers never share one.
inline constexpr std::size_t kPartAlignment = 64;

class Carver {
 public:
  FERRY_HOST_DEVICE constexpr explicit Carver(std::byte* base) : base_(base) {}

  /// Takes the next `count` elements.
  template <typename T>
  FERRY_HOST_DEVICE constexpr T* take(std::size_t count) {
    std::byte* const part = base_ == nullptr ? nullptr : base_ + used_bytes_;
    used_bytes_ += (count * sizeof(T) + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
    return reinterpret_cast<T*>(part);  // the base is aligned to a page, every part to a cache line
  }

  FERRY_HOST_DEVICE constexpr std::size_t used_bytes() const { return used_bytes_; }

 private:
  std::byte* base_;
  std::size_t used_bytes_ = 0;
};

}  // namespace ferry::plan

#endif  // FERRY_PLAN_CARVER_HPP
