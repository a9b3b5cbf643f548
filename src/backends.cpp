#include <array>

#include "core/backend.hpp"
#include "cpu/cpu_backend.hpp"
#if defined(FERRY_WITH_CUDA)
#include "cuda/cuda_backend.hpp"
#endif

namespace ferry {

std::span<const BackendFactory> backend_factories() {
#if defined(FERRY_WITH_CUDA)
  static const std::array<BackendFactory, 2> factories = {cuda::cuda_backend_factory(), cpu::cpu_backend_factory()};
#else
  static const std::array<BackendFactory, 1> factories = {cpu::cpu_backend_factory()};
#endif
  return factories;
}

}  // namespace ferry
