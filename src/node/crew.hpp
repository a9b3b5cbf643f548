#ifndef FERRY_NODE_CREW_HPP
#define FERRY_NODE_CREW_HPP

/// The ranks of a node as one of them works with them: posting steps, waiting for steps, and finding out who is to
/// blame when a wait cannot end. See control_block.hpp for the flags and their order. Ranks go by their numbers in the
/// group.

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/backend.hpp"
#include "node/control_block.hpp"
#include "node/rendezvous.hpp"

namespace ferry::node {

/// Work that a rank does bit by bit, as others let it.
class Task {
 public:
  enum class Step {
    kIdle,   ///< nothing could be done
    kMoved,  ///< something was done; the deadline of the wait starts anew
    kDone,
  };
  Task() = default;
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;
  virtual ~Task() = default;

  /// Does what can be done now. Never blocks. A task that finds fault with a peer calls Crew::fail.
  virtual Step step() = 0;
  /// Adds the ranks whose part this task lacks. Called after an idle step.
  virtual void list_missing(std::vector<int>* ranks) = 0;
  /// "dispatch (call 3): waited for it to …", for messages.
  virtual std::string describe() const = 0;
};

/// What a crew must know of the group's other nodes. Called by the crew's own thread.
class OtherNodes {
 public:
  struct Told {
    int teller = -1;
    Verdict verdict;
  };
  virtual ~OtherNodes() = default;
  /// Tell them why this rank gave up.
  virtual void tell(const Verdict& verdict) = 0;
  /// Why a rank of another node gave up, if one did and said so to this rank.
  virtual std::optional<Told> told() = 0;
  /// Lets the network move if this thread drives it. True if it did anything.
  virtual bool drive() = 0;
  /// Sleeps until the network has something to do, for at most so long. False at once where this thread does not drive
  /// it: other threads ring the crew then.
  virtual bool sleep(std::int64_t timeout_ns) = 0;
  /// Ok while `rank`, of another node, can be expected to do its part. kPeerLost, kTransport: it will not, "has died".
  virtual Status presence(int rank) = 0;
};

class Crew {
 public:
  Crew(const BackendContext& context, Rendezvous rendezvous);
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  int rank() const { return rank_; }
  /// Of this node, which are all ranks of a group with one node.
  int num_ranks() const { return static_cast<int>(peers_.size()); }
  int first_rank() const { return first_rank_; }
  int end_rank() const { return first_rank_ + num_ranks(); }
  bool includes(int rank) const { return rank >= first_rank_ && rank < end_rank(); }
  const Peer& peer(int rank) const { return peers_[static_cast<std::size_t>(rank - first_rank_)]; }
  /// Once, before the first call. Outlives the crew's calls.
  void set_other_nodes(OtherNodes* others) { others_ = others; }
  Arena& arena() { return *arena_; }
  const Arena& arena() const { return *arena_; }
  const std::shared_ptr<Arena>& shared_arena() const { return arena_; }

  /// Does every thread of this node have a core, so that waiting awake for a moment is cheap?
  bool waits_awake() const { return waits_awake_; }

  /// Why the group is broken; ok while it is not.
  const Status& broken() const { return broken_; }

  /// Begin a collective call: shows `ticket` to the peers, waits for theirs, and checks that all agree.
  /// Afterwards ticket_of() is valid until the next call begins.
  Status begin(const Ticket& ticket);
  const Ticket& ticket_of(int rank) const;
  /// The first half of begin: show `ticket`, wait for nobody.
  Status open(const Ticket& ticket);
  /// Number of the current call, from 1.
  std::uint64_t call() const { return call_; }
  /// Add the staged rows to this rank's ticket; post(kStaged) publishes them.
  void set_staged(const Location& staged);

  /// Announce that this rank reached `phase` of the current call.
  void post(Phase phase);
  /// Wait until every rank that `awaited` names (all if null) reached `phase` of the current call.
  Status wait(Phase phase, const std::vector<bool>* awaited = nullptr);
  /// Step `task` until it is done; sleep while it is idle.
  Status run(Task& task);
  /// Wake this rank, from another thread of its process: its task may have something to do.
  void ring_self();

  /// Break the group: peers that wait hear `message` at once, in 20 ms where they drive the network themselves, and it
  /// names `culprit` (-1: nobody). `note` is added to this rank's own Status only.
  Status fail(ErrorCode code, int culprit, std::string_view message, std::string_view note = {});

  /// Break the group because a wait outside of this crew's flags expired. Blames whom a peer has blamed already, else a
  /// rank that is gone, else `suspect`. `what` says what was waited for: "dispatch: waited 50 ms for rank 3 to …".
  Status give_up_on(int suspect, std::string_view what);

  /// Post nothing more; peers that wait for this rank hear of it.
  void leave();

  /// Location of [data, …) for the peers: in the arena, or an address of this process.
  Location locate(const std::byte* data, std::int64_t num_rows, std::int64_t row_bytes,
                  std::int64_t stride_bytes) const;
  /// Can `rank` reach this location of ours? / Can we reach theirs?
  bool reachable(const Location& location, int rank) const;
  /// What this rank is about to touch at a peer's location.
  struct Extent {
    std::int64_t num_rows = 0;
    std::int64_t row_bytes = 0;
  };
  /// Pointer to a peer's location, null unless it is reachable, holds `extent`, and lies inside the peer's arena.
  /// Whatever a broken peer says, what is checked here cannot make this rank touch other memory.
  std::byte* resolve(const Location& location, int rank, const Extent& extent) const;

 private:
  class PhaseTask;

  ControlBlock& control(int rank) const { return peer(rank).arena->control(); }
  bool reached(int rank, Phase phase) const;
  static void ring(ControlBlock& theirs, bool force);
  void ring_all(bool force);
  Status adopt_verdict();
  Status check_liveness(Task& task);
  bool peers_moved();
  std::int64_t patience_with_missing_ns() const;
  void sleep(std::uint32_t rings, std::int64_t timeout_ns);
  Status expire(const Task& task);

  int rank_;
  int first_rank_;
  int group_size_;
  std::int64_t timeout_ns_;
  bool waits_awake_;
  std::shared_ptr<Arena> arena_;
  std::vector<Peer> peers_;  // by rank - first_rank_
  OtherNodes* others_ = nullptr;
  std::vector<int> missing_;          // scratch of run()
  std::vector<std::uint64_t> moves_;  // how far each peer was when last looked at
  std::uint64_t call_ = 0;
  Operation operation_ = Operation::kRoute;
  Status broken_;
};

}  // namespace ferry::node

#endif  // FERRY_NODE_CREW_HPP
