#ifndef FERRY_CUDA_SYNC_CLAIM_CUH
#define FERRY_CUDA_SYNC_CLAIM_CUH

/// In place of src/cuda/sync/claim.cuh where kernels are emulated.

#include "cuda/sync/flags.cuh"

namespace ferry::cuda::device {

inline std::uint32_t claim(std::uint32_t* num_claimed) { return add_acq_rel_device(num_claimed, 1); }

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_CLAIM_CUH
