#ifndef FERRY_CUDA_INTERNODE_RAIL_WAIT_CUH
#define FERRY_CUDA_INTERNODE_RAIL_WAIT_CUH

#include "cuda/internode/exchange_params.hpp"
#include "cuda/sync/rank_sync.cuh"

namespace ferry::cuda::device {

/// Counts the time that a thread has waited for the rail peer in `node`.
__device__ __noinline__ inline void count_rail_step(const ExchangeParams& params, int node, std::uint64_t start_ns,
                                                    std::uint64_t now) {
  RailState& state = *params.rails.state;
  const WaitWords words{state.wait_ns + node, state.counted_until_ns + node,
                        params.ranks.report->waits.rails_ns + node};
  count_step(words, start_ns, now);
}

/// Time after which a wait for a rail peer is shown to the host: about that of other waits (kSpinsPerStopCheck).
inline constexpr std::uint64_t kShownRailWaitNs = 5'000'000;

/// Variant of wait_until for the rail peer in node `wait.peer`: waits until `try_once()`, on one end of the ring with
/// that peer, returns true; false if the group broke. One thread calls it. The deadline restarts whenever the ring
/// moves, since the awaited chunk may be several after the next one. Each try reads a word over PCIe, so the host's
/// stop word is read as often as the clock.
template <typename Ring, typename TryOnce>
__device__ inline bool wait_rail(const ExchangeParams& params, const Wait& wait, const Ring& ring, TryOnce try_once) {
  std::uint64_t deadline_ns = 0;
  std::uint64_t seen = 0;
  bool stopped = false;
  for (unsigned spin = 0;; ++spin) {
    if (try_once()) return true;
    const LastLook look{ring.chunk_idx(), ring.chunk_idx() + 1, stopped};
    if (stopped) {
      declare_lost(params.ranks, wait, look);
      return false;
    }
    if (spin % kSpinsPerCheck != 0) continue;
    if (is_broken(params.ranks)) return false;
    const std::uint64_t now = now_ns();
    if (deadline_ns == 0 || ring.seen() != seen) deadline_ns = now + params.rail_timeout_ns;
    seen = ring.seen();
    if (now >= deadline_ns) {
      declare_lost(params.ranks, wait, look);
      return false;
    }
    const std::uint64_t moved_ns = deadline_ns - params.rail_timeout_ns;
    if (moved_ns != now) count_rail_step(params, wait.peer, moved_ns, now);
    if (spin == 0) continue;
    if (now - moved_ns >= kShownRailWaitNs) show_wait(params.ranks, wait.awaited, wait.peer, now);
    stopped = is_stopped(params.ranks);  // try_once runs once more after this
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTERNODE_RAIL_WAIT_CUH
