/// Builds without CUDA.

#include "ucx_card/gpu_copies.hpp"

namespace ferry::ucx_card {

std::unique_ptr<GpuCopies> GpuCopies::create() { return nullptr; }

}  // namespace ferry::ucx_card
