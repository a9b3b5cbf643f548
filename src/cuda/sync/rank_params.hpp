#ifndef FERRY_CUDA_SYNC_RANK_PARAMS_HPP
#define FERRY_CUDA_SYNC_RANK_PARAMS_HPP

/// Facts about the ranks that every kernel of a call needs. Kernels take them as a __grid_constant__, so that finding a
/// peer costs no load from memory.

#include <cstddef>
#include <cstdint>

#include "cuda/sync/control.hpp"
#include "cuda/sync/report.hpp"

namespace ferry::cuda {

struct RankParams {
  /// Ranks are those of a group of several nodes, and only those of this node have a base of their own: latency mode
  /// (cuda/far). Else they are the ranks of this node.
  bool of_group = false;
  int rank = 0;
  int num_ranks = 1;
  std::byte* peer_bases[kMaxRanks] = {};  ///< address of each arena on this GPU, its own included
  Control control;                        ///< control words of this rank
  DeviceReport* report = nullptr;         ///< device address of pinned host memory
  std::uint64_t timeout_ns = 0;
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_SYNC_RANK_PARAMS_HPP
