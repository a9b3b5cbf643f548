#ifndef FERRY_CALL_GROUP_STATE_HPP
#define FERRY_CALL_GROUP_STATE_HPP

/// State of a rank's group as seen from its calls: the ranks of its node and of its rail, the current call, and the
/// error that broke the group, if any. It provides the inputs of SilenceWatch, which finds the rank at fault, and
/// passes on every error, preferring another rank's verdict to this rank's own.

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

/// Error that broke a group: as the peers receive it, and in words for this rank's caller.
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
  /// Memory of one wait at a time; kept so that waits allocate nothing.
  struct WaitMemory {
    std::vector<int> missing;
    SilenceWatch watch;
  };
  WaitMemory& wait_memory() { return wait_memory_; }
  /// [R]: time that this rank has slept while that rank's part was missing.
  const std::vector<std::int64_t>& wait_times_ns() const { return wait_times_ns_; }
  void count_wait(const std::vector<int>& missing, std::int64_t time_ns) {
    for (const int rank : missing) wait_times_ns_[static_cast<std::size_t>(rank)] += time_ns;
  }
  void set_rails(std::unique_ptr<rail::Rails> rails) { rails_ = std::move(rails); }
  /// See Backend::created.
  void created() { is_created_ = true; }

  /// Name of the current call; empty before the first.
  std::string_view operation() const { return operation_; }
  void set_operation(std::string_view operation) { operation_ = operation; }

  /// Error that broke the group; ok while it is not broken.
  const Status& broken() const { return broken_; }
  /// Breaks the group. Waiting ranks receive `message` at once (within 20 ms if they drive the network themselves); it
  /// names `culprit` (-1: none). If another rank has given up already, its error is used, so that all ranks blame the
  /// same rank, unless this rank is the culprit.
  Status fail(ErrorCode code, int culprit, std::string_view message);
  /// Adopts the error of a rank that gave up, if one did.
  Status adopt_reported_error();
  /// For the end of a call that read memory of this node's ranks: ok if that memory was still valid when it was read. A
  /// rank that gave up in this call may free its memory at any time, but only after it has published its error. A rank
  /// that gave up in a later call had waited for this rank's reads.
  Status confirm_reads();
  /// Breaks the group because a wait that does not use Wait timed out. Blames the rank that another rank has blamed
  /// already, else a lost rank, else `suspect`. `what` describes the wait: "dispatch: timed out after 50 ms waiting …".
  Status give_up_on(int suspect, std::string_view what);
  /// Reports give_up_on()'s verdict to the peers, from a thread other than the one that makes this rank's calls, which
  /// adopts the verdict when it fails itself. Does nothing if this rank has reported an error before. Over several
  /// nodes only if ranks do not drive the network themselves.
  void report_lost(int suspect, std::string_view what);
  /// Over several nodes: passes an error that a rank of this node or rail has reported to the other ranks of both, as a
  /// waiting rank does; for a rank whose own thread makes no call. False if there is none. Any thread.
  bool pass_on_error();
  /// Whether another rank of this node or this rail has reported an error, or is lost. Any thread.
  bool someone_gave_up() const;
  bool someone_is_lost() const;
  /// Ranks of this node for which none need wait when all ask for the next view: those that have ended and, if the
  /// group broke for a timeout, the one that it names. It may be named twice.
  std::vector<int> silent_ranks() const;
  /// `find_lost` finds a lost rank of another node that is perhaps on no rail of this rank: the status says why, and
  /// names it; ok if there is none. Any thread calls it. Null ends that.
  void watch_others(std::function<Status()> find_lost);
  /// Posts nothing more, and notifies the ranks that wait for this one.
  void leave();

  /// Ok while `rank` can be expected to do its part; otherwise the message is the cause: "has died".
  Status check_presence(int rank) const;
  /// Breaks the group because a missing rank is lost. `presence` is the result of check_presence(), `waiting_for` the
  /// argument of the Wait.
  Status fail_for_lost(int rank, const Status& presence, std::string_view waiting_for);
  /// Counts work done in a call.
  void count_progress();
  /// Beats once per interval, to show the ranks of this node and rail that this rank waits; called often during waits.
  /// Returns the time until the next beat.
  std::int64_t beat_if_due(std::int64_t now_ns);
  /// Last sign of `rank`, a rank of this node or rail.
  Sign sign_of(int rank) const;
  /// Called when a wait begins. It delays the first call of `interrupted`: most waits end before that.
  void expect_wait(std::int64_t now_ns);
  /// Breaks the group if the program wants this rank to stop waiting (GroupOptions::interrupted). Called often while
  /// the thread that makes this rank's calls waits. `call`: name of the call if it is not one that the node numbers.
  Status check_interrupt(std::int64_t now_ns, std::string_view call = {}) {
    if (!interrupted_ || now_ns < next_question_ns_) return {};
    return ask_for_interrupt(now_ns, call);
  }
  /// Shows readers of the flight record that this rank waits for `missing`.
  void show_wait(const std::vector<int>& missing, std::string_view waiting_for, std::int64_t since_ns) {
    peers_.recorder().show_wait(kHostWait, missing, waiting_for, since_ns);
  }
  void end_wait() { peers_.recorder().end_wait(kHostWait); }
  /// Breaks the group because there was no progress until the deadline.
  Status fail_for_timeout(const SilenceWatch::Verdict& verdict, std::size_t num_missing, std::string_view waiting_for);

 private:
  GroupState(const BackendContext& context, std::uint64_t group_id, node::Rendezvous rendezvous);
  std::string describe_call() const;
  /// "; rank 2 returned from …" of a rank of this node, from its flight record; empty for this rank and other nodes'.
  std::string last_seen_of(int rank) const;
  /// Another rank's error, with a note that names the reporter.
  Verdict adopted(const ReportedError& reported) const;
  std::optional<ReportedError> find_reported_error() const;
  /// Verdict on a wait that does not use Wait. Reads shared words only.
  Verdict judge(int suspect, std::string_view what) const;
  Status break_group(const Verdict& verdict);
  Status find_other_loss() const;
  Status ask_for_interrupt(std::int64_t now_ns, std::string_view call);

  Topology topology_;
  std::int64_t timeout_ns_;
  std::function<bool()> interrupted_;
  std::int64_t next_question_ns_ = 0;
  bool spins_;
  bool is_created_ = false;
  node::Peers peers_;
  std::unique_ptr<rail::Rails> rails_;
  std::string operation_;
  Status broken_;
  WaitMemory wait_memory_;
  std::vector<std::int64_t> wait_times_ns_;
  std::int64_t next_beat_ns_ = 0;
  mutable std::mutex others_mutex_;
  std::function<Status()> others_;  // guarded by others_mutex_
  std::mutex report_mutex_;         // between break_group and report_lost
  bool reported_ = false;           // guarded by report_mutex_: the peers have this rank's error
  std::optional<Verdict> watched_;  // guarded by report_mutex_: verdict of report_lost
};

}  // namespace ferry::call

#endif  // FERRY_CALL_GROUP_STATE_HPP
