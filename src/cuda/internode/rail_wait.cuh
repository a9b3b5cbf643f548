#ifndef FERRY_CUDA_INTERNODE_RAIL_WAIT_CUH
#define FERRY_CUDA_INTERNODE_RAIL_WAIT_CUH

#include "cuda/internode/exchange_params.hpp"
#include "cuda/sync/rank_sync.cuh"

namespace ferry::cuda::device {

/// As wait_until, for a rail peer, whose node `wait.peer` is: until `try_once()` is true; false when the group broke.
/// One thread. `chunk_idx`: the chunk that is waited for, to be reported. Every try looks over PCIe, so the host's stop
/// word is looked at as often as the clock.
template <typename TryOnce>
__device__ inline bool wait_rail(const ExchangeParams& params, const Wait& wait, TryOnce try_once,
                                 std::uint64_t chunk_idx) {
  std::uint64_t deadline_ns = 0;
  bool stopped = false;
  for (unsigned spin = 0;; ++spin) {
    if (try_once()) return true;
    const LastLook look{chunk_idx, chunk_idx + 1, stopped};
    if (stopped) {
      declare_lost(params.ranks, wait, look);
      return false;
    }
    if (spin % kSpinsPerCheck != 0) continue;
    if (is_broken(params.ranks)) return false;
    const std::uint64_t now = now_ns();
    if (deadline_ns == 0) deadline_ns = now + params.rail_timeout_ns;
    if (now >= deadline_ns) {
      declare_lost(params.ranks, wait, look);
      return false;
    }
    stopped = spin != 0 && is_stopped(params.ranks);  // tried once more after it
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTERNODE_RAIL_WAIT_CUH
