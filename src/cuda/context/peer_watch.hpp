#ifndef FERRY_CUDA_CONTEXT_PEER_WATCH_HPP
#define FERRY_CUDA_CONTEXT_PEER_WATCH_HPP

/// Watches the peers for this rank's kernels, which cannot see that a process has died or that a rank has given up. One
/// host thread per rank polls the peers, whatever the rank itself is doing, and stops this rank's waiting kernels once
/// a peer is lost. It treats peers in this process and in others alike and makes no CUDA call, so no work on the GPU
/// can delay it. Kernels that continue without lost ranks read LostRanks instead.
///
/// A kernel that is stopped writes the same report as one that times out. It fails only if it was really waiting: calls
/// that already have all their data complete. From that report the watch also informs the peers, since a rank's own
/// thread may make no call for a long time; the verdict is the same as the rank's own.
///
/// It also shows in the rank's flight record which ranks the kernels wait for (WaitingWords).

#include <array>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "call/group_state.hpp"
#include "cuda/context/rail_link.hpp"
#include "cuda/sync/call_log.hpp"
#include "cuda/sync/report.hpp"
#include "ferry/status.hpp"

namespace ferry::cuda {

class PeerWatch {
 public:
  /// All arguments must outlive the watch. `report`: pinned memory that this rank's kernels reach. `calls`: the log for
  /// messages, if there is one. `rail_link`: in groups of several nodes.
  PeerWatch(call::GroupState& group, DeviceReport& report, std::optional<CallLog> calls = std::nullopt,
            RailLink* rail_link = nullptr)
      : group_(group), report_(report), calls_(calls), rail_link_(rail_link) {}
  /// Ends the thread.
  ~PeerWatch();
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  /// Makes the watch also report lost ranks to kernels. Call before start().
  void tell_lost_ranks() { was_lost_.resize(static_cast<std::size_t>(group_.topology().num_ranks)); }

  /// Starts to watch. In a group of one rank this does nothing.
  /// @errors kSystem: no thread could be started
  Status start();

 private:
  void watch() noexcept;
  void look();
  void look_for_lost_ranks();
  void look_at_waits();
  int rank_of_word(int word_idx) const;

  call::GroupState& group_;
  DeviceReport& report_;
  const std::optional<CallLog> calls_;
  RailLink* rail_link_;
  // Used by the watch's thread only.
  bool told_ = false;         // the peers have been informed of a failed wait on this rank
  bool lost_before_ = false;  // a peer was lost at an earlier poll
  bool stopped_ = false;
  struct SeenWait {
    std::uint64_t word = 0;
    std::int64_t since_ns = 0;    // when the wait was first seen
    std::int64_t changed_ns = 0;  // when its word last changed; 0: no wait
  };
  std::array<SeenWait, WaitingWords::kNumWords> waits_{};
  std::vector<int> shown_waits_;  // ranks of the wait that the flight record shows
  std::vector<bool> was_lost_;    // lost_before_ of each rank; empty: lost ranks are not reported to kernels

  std::mutex mutex_;
  std::condition_variable ending_;
  bool ends_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_CONTEXT_PEER_WATCH_HPP
