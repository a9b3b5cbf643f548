#ifndef FERRY_NET_LOOPBACK_REGION_HPP
#define FERRY_NET_LOOPBACK_REGION_HPP

#include <cstddef>
#include <span>

#include "net/engine.hpp"

namespace ferry::net::loopback {

/// Memory that an offset refers to. This engine copies with processors, so its "GPU memory" must be memory that they
/// can access, as it is in tests.
struct Region {
  std::span<std::byte> memory;
  std::size_t offset = 0;

  static Region of(const EngineOptions& options, std::size_t offset) {
    if (offset < kGpuOffset) return {options.memory, offset};
    return {options.gpu_memory, offset - kGpuOffset};
  }
  bool contains(std::size_t num_bytes) const { return offset <= memory.size() && num_bytes <= memory.size() - offset; }
};

}  // namespace ferry::net::loopback

#endif  // FERRY_NET_LOOPBACK_REGION_HPP
