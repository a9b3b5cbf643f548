#ifndef FERRY_CUDA_SYNC_CORRUPT_TEXT_HPP
#define FERRY_CUDA_SYNC_CORRUPT_TEXT_HPP

#include "cuda/sync/corrupt_report.hpp"
#include "ferry/status.hpp"

namespace ferry::cuda {

/// Error of the rows that a kernel of `rank` has found to be wrong.
/// @errors kDataCorrupt
Status describe_corrupt(const CorruptReport& report, int rank);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_SYNC_CORRUPT_TEXT_HPP
