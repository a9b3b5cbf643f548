#ifndef FERRY_CALL_WAIT_HPP
#define FERRY_CALL_WAIT_HPP

/// The wait loop of every call, both for flags of this node's ranks and for rings from other nodes:
///
///     Wait wait(state, "to send its rows");
///     while (true) {
///       wait.begin_poll();                     // before flags and rings are read
///       if (…everything awaited has arrived…) return {};
///       if (…something was done…) { wait.progressed(); continue; }
///       if (Status status = wait.idle([&](std::vector<int>* missing) { …add ranks… }); !status.ok()) return status;
///     }
///
/// It polls briefly, then sleeps until a peer rings or the network moves; it checks for errors that others reported and
/// for lost ranks, shows the others that this rank waits, and breaks the group when nothing has moved for the group's
/// deadline (silence_watch.hpp).

#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

#include "call/group_state.hpp"

namespace ferry::call {

class Wait {
 public:
  /// `waiting_for` completes "timed out waiting for rank 3 …" and outlives the wait. `longest_sleep_ns`: for what comes
  /// from outside the group, and wakes no rank.
  Wait(GroupState& state, std::string_view waiting_for,
       std::int64_t longest_sleep_ns = std::numeric_limits<std::int64_t>::max());
  ~Wait() {
    if (has_slept_) state_.end_wait();
  }
  Wait(const Wait&) = delete;
  Wait& operator=(const Wait&) = delete;

  /// Begins a poll: every later change wakes the rank from the sleep in the next idle().
  void begin_poll() { rings_ = state_.peers().doorbell(); }
  /// Records progress since begin_poll(); restarts the deadline.
  void progressed();
  /// Records that nothing could be done since begin_poll(). `list_missing` adds the ranks whose part is missing; it is
  /// called only if the list is needed.
  /// @errors the group is broken
  template <typename ListMissing>
  Status idle(ListMissing&& list_missing) {
    if (poll_again()) return {};
    missing_.clear();
    list_missing(&missing_);
    return sleep_or_fail();
  }

 private:
  bool poll_again();
  Status sleep_or_fail();
  Status check_lost();
  void sleep(std::int64_t timeout_ns);
  void show(std::int64_t now_ns);

  GroupState& state_;
  std::string_view waiting_for_;
  std::int64_t longest_sleep_ns_;
  SilenceWatch& watch_;
  /// False: the watch is restarted before the next sleep, so that the clock is not read while there is progress.
  bool watching_ = false;
  bool has_slept_ = false;
  std::int64_t next_check_ns_ = 0;
  int num_idle_ = 0;
  int num_network_turns_ = 0;
  bool network_moved_ = false;
  int lost_rank_ = -1;  // found missing and lost once: polled again before it is blamed
  std::uint32_t rings_ = 0;
  std::int64_t shown_since_ns_ = 0;    // of the wait that the flight record shows
  std::size_t num_shown_missing_ = 0;  // the same; 0: it shows none
  std::vector<int>& missing_;
};

}  // namespace ferry::call

#endif  // FERRY_CALL_WAIT_HPP
