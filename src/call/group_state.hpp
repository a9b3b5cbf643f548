#ifndef FERRY_CALL_GROUP_STATE_HPP
#define FERRY_CALL_GROUP_STATE_HPP

/// What a rank knows of its group while it makes calls: the ranks of its node and of its rail, the current call, and
/// why the group is broken, if it is. Decides which rank a failed wait blames; nothing else does.

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/backend.hpp"
#include "node/peers.hpp"
#include "rail/rails.hpp"

namespace ferry::call {

/// Memory of the wait loop, kept so that waits allocate nothing.
struct WaitScratch {
  std::vector<int> missing;
  std::vector<std::uint64_t> seen_progress;  ///< by rank of this node
};

/// Why a group is broken: what this rank tells its caller and the others.
struct Verdict {
  ErrorCode code = ErrorCode::kTimeout;
  int culprit = -1;  ///< rank to blame, -1: none
  std::string message;
  std::string note;  ///< added to this rank's own Status only
};

class GroupState {
 public:
  GroupState(const BackendContext& context, node::Rendezvous rendezvous);
  /// Leaves the group.
  ~GroupState();
  GroupState(const GroupState&) = delete;
  GroupState& operator=(const GroupState&) = delete;

  int rank() const { return topology_.rank; }
  const Topology& topology() const { return topology_; }
  std::int64_t timeout_ns() const { return timeout_ns_; }
  /// Whether every thread of this node has a core, so that brief polling delays no other rank.
  bool spins() const { return spins_; }
  /// The ranks of this node.
  node::Peers& peers() { return peers_; }
  const node::Peers& peers() const { return peers_; }
  /// The ranks of this rail. Only in groups of several nodes.
  rail::Rails& rails() { return *rails_; }
  bool has_rails() const { return rails_ != nullptr; }
  /// Of one wait at a time.
  WaitScratch& wait_scratch() { return wait_scratch_; }
  void set_rails(std::unique_ptr<rail::Rails> rails) { rails_ = std::move(rails); }

  /// Name of the current call; empty before the first.
  std::string_view operation() const { return operation_; }
  void set_operation(std::string_view operation) { operation_ = operation; }

  /// Why the group is broken; ok while it is not.
  const Status& broken() const { return broken_; }
  /// Breaks the group. Waiting ranks receive `message` at once (within 20 ms if they drive the network themselves); it
  /// names `culprit` (-1: none). `note` is added to this rank's own Status only.
  Status fail(ErrorCode code, int culprit, std::string_view message, std::string_view note = {});
  /// Takes over the error of a rank that gave up, if one did: all ranks then blame the same one.
  Status adopt_reported_error();
  /// Breaks the group because a wait that is not a Wait timed out. Blames the rank that another has blamed already,
  /// else a rank that is lost, else `suspect`. `what` describes the wait: "dispatch: timed out after 50 ms waiting …".
  Status give_up_on(int suspect, std::string_view what);
  /// Reports to the peers what give_up_on() would, from a thread other than the one that makes this rank's calls: those
  /// take it over when they fail themselves. Nothing if this rank has reported an error before. One node only.
  void report_lost(int suspect, std::string_view what);
  /// Posts nothing more; ranks that wait for this one are notified.
  void leave();

  /// Ok while `rank` can be expected to do its part; otherwise the message says what happened to it: "has died".
  Status check_presence(int rank) const;
  /// Breaks the group because a missing rank is lost. `presence` comes from check_presence(), `waiting_for` is that of
  /// the Wait.
  Status fail_for_lost(int rank, const Status& presence, std::string_view waiting_for);
  /// Breaks the group because there was no progress until the deadline.
  Status fail_for_timeout(const std::vector<int>& missing, std::string_view waiting_for);
  /// How much longer to wait when another rank may know better which rank to blame.
  std::int64_t patience_ns(const std::vector<int>& missing) const;

 private:
  std::string describe_call() const;
  /// What another rank has reported, with a note that says so.
  std::optional<Verdict> reported_verdict() const;
  /// Whom to blame for a wait that is no Wait. Reads shared words only.
  Verdict judge(int suspect, std::string_view what) const;

  Topology topology_;
  std::int64_t timeout_ns_;
  bool spins_;
  node::Peers peers_;
  std::unique_ptr<rail::Rails> rails_;
  std::string operation_;
  Status broken_;
  WaitScratch wait_scratch_;
  std::mutex report_mutex_;         // between fail and report_lost
  bool reported_ = false;           // guarded by report_mutex_: the peers have this rank's error
  std::optional<Verdict> watched_;  // guarded by report_mutex_: what report_lost has reported
};

/// Whether this process may run on that many cores.
bool cores_suffice_for(int num_threads);

}  // namespace ferry::call

#endif  // FERRY_CALL_GROUP_STATE_HPP
