#ifndef FERRY_CUDA_SYNC_RANK_PARAMS_HPP
#define FERRY_CUDA_SYNC_RANK_PARAMS_HPP

/// What every kernel of a call needs to know about the ranks. Kernels take it as a __grid_constant__, so that finding a
/// peer costs no load from memory.

#include <cstddef>
#include <cstdint>

#include "cuda/sync/control.hpp"
#include "cuda/sync/report.hpp"

namespace ferry::cuda {

struct RankParams {
  int rank = 0;
  int num_ranks = 1;
  std::byte* peer_bases[kMaxRanks] = {};  ///< where this GPU sees each arena, own one included
  Control control;                        ///< this rank's own
  DeviceReport* report = nullptr;         ///< device's address of pinned host memory
  std::uint64_t timeout_ns = 0;
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_SYNC_RANK_PARAMS_HPP
