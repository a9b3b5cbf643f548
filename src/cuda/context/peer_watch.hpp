#ifndef FERRY_CUDA_CONTEXT_PEER_WATCH_HPP
#define FERRY_CUDA_CONTEXT_PEER_WATCH_HPP

/// Kernels cannot see that a process has died or that a rank has given up; hosts can. One thread per rank looks at the
/// peers, whatever the rank itself is doing, and stops this rank's waiting kernels once one of them is lost. It is the
/// same for peers in other processes and in this one, and makes no CUDA call, so that nothing on the GPU can delay it.
/// Kernels that go on without lost ranks look at which those are instead (LostRanks).
///
/// A kernel that is stopped writes the same report as one that times out, and so fails only if it really was waiting:
/// calls that already have what they need complete. From that report the watch also tells the peers, for a rank whose
/// own thread may make no call for a long time; the verdict is the one that the rank itself would reach.

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
  /// All must outlive the watch. `report` is pinned memory, which this rank's kernels reach. `calls`, if there is such
  /// a log, is for its messages. `rail_link`: in groups of several nodes.
  PeerWatch(call::GroupState& group, DeviceReport& report, std::optional<CallLog> calls = std::nullopt,
            RailLink* rail_link = nullptr)
      : group_(group), report_(report), calls_(calls), rail_link_(rail_link) {}
  /// Ends the thread.
  ~PeerWatch();
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  /// Also tells kernels which ranks are lost. Before start().
  void tell_lost_ranks() { was_lost_.resize(static_cast<std::size_t>(group_.topology().num_ranks)); }

  /// Starts to watch. A group of one rank has nobody to watch.
  /// @errors kSystem: no thread could be started
  Status start();

 private:
  void watch() noexcept;
  void look();
  void look_for_lost_ranks();

  call::GroupState& group_;
  DeviceReport& report_;
  const std::optional<CallLog> calls_;
  RailLink* rail_link_;
  // Of the thread.
  bool told_ = false;         // the peers know of a wait that failed here
  bool lost_before_ = false;  // a peer was lost at an earlier look
  bool stopped_ = false;
  std::vector<bool> was_lost_;  // of each rank, as lost_before_; empty: kernels are not told which

  std::mutex mutex_;
  std::condition_variable ending_;
  bool ends_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_CONTEXT_PEER_WATCH_HPP
