#include <array>

#include "core/backend.hpp"
#include "cpu/cpu_backend.hpp"

namespace ferry {

std::span<const BackendFactory> backend_factories() {
  static const std::array<BackendFactory, 1> factories = {cpu::cpu_backend_factory()};
  return factories;
}

}  // namespace ferry
