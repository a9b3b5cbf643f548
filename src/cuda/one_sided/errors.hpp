#ifndef FERRY_CUDA_ONE_SIDED_ERRORS_HPP
#define FERRY_CUDA_ONE_SIDED_ERRORS_HPP

#include "ferry/device/world.hpp"
#include "ferry/status.hpp"

namespace ferry::cuda {

/// Takes the error that kernels have recorded, so that they may record another; ok if there is none. `presence`: the
/// host's view of the ranks, for errors that name none.
Status take_error(::ferry::device::ErrorRecord& record, const Status& presence);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_ONE_SIDED_ERRORS_HPP
