#ifndef FERRY_CUDA_CONTEXT_FIRST_EPOCH_HPP
#define FERRY_CUDA_CONTEXT_FIRST_EPOCH_HPP

#include <cstdint>

namespace ferry::cuda {

/// For tests of behaviour after very many calls: groups that this process makes from now on count their epochs from
/// this number instead of 0. All ranks of a group must set the same number.
void count_epochs_from(std::uint64_t epoch);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_CONTEXT_FIRST_EPOCH_HPP
