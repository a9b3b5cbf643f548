#ifndef FERRY_CALL_GROUP_STATE_HPP
#define FERRY_CALL_GROUP_STATE_HPP

/// What a rank knows of its group while it makes calls: the ranks of its node and of its rail, the current call, and
/// why the group is broken, if it is. What SilenceWatch needs to find the rank to blame passes through here. So does
/// each error: a verdict of another rank before this rank's own.

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "call/silence_watch.hpp"
#include "core/backend_context.hpp"
#include "node/peers.hpp"
#include "rail/rails.hpp"

namespace ferry::call {

/// Why a group is broken: as the peers are told, and in words for this rank's caller.
struct Verdict {
  ErrorRecord record;
  std::string message;
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
  /// Of one wait at a time; kept so that waits allocate nothing.
  struct WaitMemory {
    std::vector<int> missing;
    SilenceWatch watch;
  };
  WaitMemory& wait_memory() { return wait_memory_; }
  /// By rank: how long this one has slept while its part was missing.
  const std::vector<std::int64_t>& wait_times_ns() const { return wait_times_ns_; }
  void count_wait(const std::vector<int>& missing, std::int64_t time_ns) {
    for (const int rank : missing) wait_times_ns_[static_cast<std::size_t>(rank)] += time_ns;
  }
  void set_rails(std::unique_ptr<rail::Rails> rails) { rails_ = std::move(rails); }

  /// Name of the current call; empty before the first.
  std::string_view operation() const { return operation_; }
  void set_operation(std::string_view operation) { operation_ = operation; }

  /// Why the group is broken; ok while it is not.
  const Status& broken() const { return broken_; }
  /// Breaks the group. Waiting ranks receive `message` at once (within 20 ms if they drive the network themselves); it
  /// names `culprit` (-1: none). If another rank has given up already, its error counts, so that all ranks blame the
  /// same one, unless this rank is the culprit.
  Status fail(ErrorCode code, int culprit, std::string_view message);
  /// Takes over the error of a rank that gave up, if one did.
  Status adopt_reported_error();
  /// For the end of a call that read memory of this node's ranks: ok if what was read was still theirs. A rank that
  /// gave up in this call may free it at any time, and does so only after it has published its error. One that gave up
  /// in a later call had waited for this rank's reads.
  Status confirm_reads();
  /// Breaks the group because a wait that is not a Wait timed out. Blames the rank that another has blamed already,
  /// else a rank that is lost, else `suspect`. `what` describes the wait: "dispatch: timed out after 50 ms waiting …".
  Status give_up_on(int suspect, std::string_view what);
  /// Reports to the peers what give_up_on() would, from a thread other than the one that makes this rank's calls: those
  /// take it over when they fail themselves. Nothing if this rank has reported an error before. Over several nodes only
  /// where ranks do not drive the network themselves.
  void report_lost(int suspect, std::string_view what);
  /// Over several nodes: tells this rank's node and rail of an error that one of them has reported, as a rank does that
  /// waits; for a rank whose own thread makes no call. False if there is none. Any thread.
  bool pass_on_error();
  /// Whether another rank of this node or this rail has reported an error, or is lost. Any thread.
  bool someone_gave_up() const;
  bool someone_is_lost() const;
  /// Posts nothing more; ranks that wait for this one are notified.
  void leave();

  /// Ok while `rank` can be expected to do its part; otherwise the message says what happened to it: "has died".
  Status check_presence(int rank) const;
  /// Breaks the group because a missing rank is lost. `presence` comes from check_presence(), `waiting_for` is that of
  /// the Wait.
  Status fail_for_lost(int rank, const Status& presence, std::string_view waiting_for);
  /// Counts work done in a call.
  void count_progress();
  /// To be called often while this rank waits: shows that to the ranks of its node and of its rail once an interval.
  /// Returns the time to the next one.
  std::int64_t beat_if_due(std::int64_t now_ns);
  /// What `rank`, of this node or this rail, has shown last.
  Sign sign_of(int rank) const;
  /// To be called when a wait begins: most are over before the program need be asked whether it wants to end them.
  void expect_wait(std::int64_t now_ns);
  /// Breaks the group if the program wants this rank to wait no longer (GroupOptions::interrupted). To be called often
  /// while the thread that makes this rank's calls waits. `call`: its name where it is none of the node's calls.
  Status check_interrupt(std::int64_t now_ns, std::string_view call = {}) {
    if (!interrupted_ || now_ns < next_question_ns_) return {};
    return ask_for_interrupt(now_ns, call);
  }
  /// Breaks the group because there was no progress until the deadline.
  Status fail_for_timeout(const SilenceWatch::Verdict& verdict, std::size_t num_missing, std::string_view waiting_for);

 private:
  std::string describe_call() const;
  /// An error of another rank, with a note that says so.
  Verdict adopted(const ReportedError& reported) const;
  std::optional<ReportedError> find_reported_error() const;
  /// Whom to blame for a wait that is no Wait. Reads shared words only.
  Verdict judge(int suspect, std::string_view what) const;
  Status break_group(const Verdict& verdict);
  Status ask_for_interrupt(std::int64_t now_ns, std::string_view call);

  Topology topology_;
  std::int64_t timeout_ns_;
  std::function<bool()> interrupted_;
  std::int64_t next_question_ns_ = 0;
  bool spins_;
  node::Peers peers_;
  std::unique_ptr<rail::Rails> rails_;
  std::string operation_;
  Status broken_;
  WaitMemory wait_memory_;
  std::vector<std::int64_t> wait_times_ns_;
  std::int64_t next_beat_ns_ = 0;
  std::mutex report_mutex_;         // between break_group and report_lost
  bool reported_ = false;           // guarded by report_mutex_: the peers have this rank's error
  std::optional<Verdict> watched_;  // guarded by report_mutex_: what report_lost has reported
};

}  // namespace ferry::call

#endif  // FERRY_CALL_GROUP_STATE_HPP
