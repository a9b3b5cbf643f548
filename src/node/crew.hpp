#ifndef FERRY_NODE_CREW_HPP
#define FERRY_NODE_CREW_HPP

/// The ranks of a group as one of them works with them: posting steps, waiting for steps, and finding out who is to
/// blame when a wait cannot end. See control_block.hpp for the flags and their order.

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/backend.hpp"
#include "node/control_block.hpp"
#include "node/rendezvous.hpp"

namespace ferry::node {

class Crew {
 public:
  Crew(const BackendContext& context, Rendezvous rendezvous);
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  int rank() const { return rank_; }
  int num_ranks() const { return static_cast<int>(peers_.size()); }
  const Peer& peer(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }
  Arena& arena() { return *arena_; }
  const Arena& arena() const { return *arena_; }
  const std::shared_ptr<Arena>& shared_arena() const { return arena_; }

  /// Why the group is broken; ok while it is not.
  const Status& broken() const { return broken_; }

  /// Begin a collective call: shows `ticket` to the peers, waits for theirs, and checks that all agree.
  /// Afterwards ticket_of() is valid until the next call begins.
  Status begin(const Ticket& ticket);
  const Ticket& ticket_of(int rank) const;
  /// Add the staged rows to this rank's ticket; post(kStaged) publishes them.
  void set_staged(const Location& staged);

  /// Announce that this rank reached `phase` of the current call.
  void post(Phase phase);
  /// Wait until every rank that `awaited` names (all if null) reached `phase` of the current call.
  Status wait(Phase phase, const std::vector<bool>* awaited = nullptr);

  /// Break the group: peers that wait hear `message` at once, and it names `culprit` (-1: nobody). `note` is added to
  /// this rank's own Status only.
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
  ControlBlock& control(int rank) const { return peers_[static_cast<std::size_t>(rank)].arena->control(); }
  bool reached(int rank, Phase phase) const;
  void ring_all(bool force);
  Status adopt_verdict();
  Status check_liveness(Phase phase, std::span<const int> missing);
  Status expire(Phase phase, std::span<const int> missing);
  std::string describe_call(Phase phase) const;

  int rank_;
  std::int64_t timeout_ns_;
  std::shared_ptr<Arena> arena_;
  std::vector<Peer> peers_;
  std::vector<int> missing_;  // scratch of wait()
  std::uint64_t call_ = 0;
  Operation operation_ = Operation::kRoute;
  Status broken_;
};

}  // namespace ferry::node

#endif  // FERRY_NODE_CREW_HPP
