#ifndef FERRY_ONE_SIDED_FABRIC_HPP
#define FERRY_ONE_SIDED_FABRIC_HPP

/// Host side of a OneSided, on every backend: this rank's host heap and the mapped heaps of its node, the driver of the
/// network if there are several nodes, meetings of hosts, and detection of lost ranks.
///
/// The heap follows a control area, at the same offset in each rank's arena; both together are the memory that engines
/// of other nodes reach. Control words:
///
///   word             writer      readers  order                    publishes
///   arrived[t][n][s] team mates  owner    exchange / acquire       the mate's work before its barrier (in its node);
///                                                                  t: slot in which the owner keeps the team,
///                                                                  n: parity of the meeting's number
///   finished         all ranks   owner    exchange / acquire       all ranks have reached the last barrier
///   entries[t]       team mates  owner    before a barrier         entry that a rank shows in an exchange of the team
///   notices[r]       rank r      owner    seq_cst                  its own, which ranks of its node read too: meetings
///                                                                  that it is through, before it leaves; of others:
///                                                                  copies of rank r's
///   doorbell         all         owner    fetch_add seq_cst, futex nothing; wakes sleepers
///   num_sleepers     owner       all      seq_cst                  nothing; no thread is woken while it is 0
///   watched          owner       all      seq_cst                  nothing; a single sleeper is woken for that word
///                                                                  alone. One of several sleepers may miss a wake-up
///                                                                  when another leaves: naps are short
///
/// A barrier disseminates: in step s a rank sets arrived[t][n][s] of the team mate 2^s places further on to the number
/// of the barrier and the kinds of meetings that it has heard of, and waits until its own word has that number. Each
/// word has one writer, which sets it again two barriers later: by then the owner has reached the barrier between, so
/// it has read the earlier value. Hence the barrier needs no ordering from the network.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/backend.hpp"
#include "ferry/status.hpp"
#include "node/peers.hpp"
#include "one_sided/backend.hpp"
#include "one_sided/control.hpp"
#include "one_sided/driver.hpp"
#include "one_sided/notice.hpp"

namespace ferry::one_sided {

class Fabric {
 public:
  /// Collective: succeeds on all ranks or fails on all. `heap_bytes`: size of the host heap, a multiple of a page; 0:
  /// no heap.
  static Result<std::unique_ptr<Fabric>> create(const BackendContext& context, std::size_t heap_bytes);
  ~Fabric();
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  const Topology& topology() const { return topology_; }
  std::int64_t timeout_ns() const { return timeout_ns_; }
  std::span<const int> all_ranks() const { return all_ranks_; }
  bool in_node(int rank) const { return topology_.node_of(rank) == topology_.node_of(topology_.rank); }

  /// This rank's host heap, zeroed at creation, mapped shared, page-aligned.
  std::byte* heap() const { return peer_heap(topology_.rank); }
  std::size_t heap_bytes() const { return heap_bytes_; }
  /// Host heap of a rank of this node; null for other ranks.
  std::byte* peer_heap(int rank) const;
  /// Converts an offset in the heap to one in the engine's memory, for NetworkRequest::offset.
  std::size_t engine_offset(std::size_t heap_offset) const;

  /// Ranks of this node, and links to those that are other processes.
  node::Peers& peers() { return peers_; }
  /// Null on one node.
  Driver* driver() { return driver_.get(); }

  /// Wakes sleeping threads of a rank of this node, this rank included, after the word at `offset` of its memory
  /// (engine_offset) has changed. kAnyWord: after any word has.
  void ring(int rank, std::size_t offset) const;

  /// Ok, or kPeerLost / kTransport for the one of `ranks` whose loss explains that of the others. Costs system calls.
  Status presence(std::span<const int> ranks) const;
  Status presence() const { return presence(all_ranks_); }
  /// Ok if the rank is present, else the error with which a call that needs it ends; tells the other ranks why this one
  /// may leave.
  Status report_loss(int rank);

  /// Passes a request to the driver; drives the network until it can be issued.
  /// @errors kTimeout; for a lost peer its status: the request was not issued, and its completion receives no callback
  Status issue(const NetworkRequest& request, std::string_view operation);

  /// Awaited event, for messages ("rank 3's answer to a get"), and the rank that must bring it about, -1: any.
  struct Awaited {
    std::string what;
    int rank = -1;
  };
  /// Waits until `done()`, driving the network meanwhile.
  /// @errors kTimeout; kPeerLost, kTransport: one of `ranks` is lost, which is checked at intervals
  struct Wait {
    std::string_view operation;
    std::function<Awaited()> what;
    std::span<const int> ranks{};
    std::int64_t timeout_ns = 0;
    std::size_t word = kAnyWord;  ///< the only word of this rank's memory (engine_offset) that the wait depends on
    /// Set if the wait is part of a collective call of the team. A mate that is through its current meeting counts as
    /// present, a loss that another one found as this rank's own, and an error names the rank for which all wait.
    const TeamState* team = nullptr;
  };
  Status wait(const Wait& wait, const std::function<bool()>& done);

  /// Waits until all operations that calls of this rank gave the driver, or those to `rank` alone, are complete, and
  /// fences the processor's stores. `team`: see Wait; a mate's loss then ends it.
  Status quiet(std::string_view operation, const TeamState* team = nullptr, int rank = kEveryRank);

  /// Barrier among the hosts of the team. Stores and operations completed by quiet before it are visible to all ranks
  /// after it. The next call continues a barrier that ended by its deadline.
  /// @errors as wait; kInvalidArgument: an exchange of the team is unfinished, and mates may count on its remaining
  /// steps
  Status barrier(const TeamState& team, std::string_view operation);
  /// See Backend::exchange; without quiet. An exchange that ended by its deadline continues when it is called again
  /// with an equal entry, whatever other teams did meanwhile; with a different entry, if no mate can have seen the
  /// first one.
  /// @errors as wait; kInvalidArgument: a barrier of the team, or an exchange of another entry, is unfinished
  Result<std::vector<Entry>> exchange(const TeamState& team, const Entry& mine, std::string_view operation);

  /// Last meeting of all ranks, after which some may be gone before others have noticed it; then closes the network and
  /// notifies the ranks of the node that this rank has left.
  Status leave(const TeamState& world, std::string_view operation);
  /// Leaves without a meeting: other ranks find this rank lost. No call may follow, except this one, which then has no
  /// effect.
  void abandon();

 private:
  /// While one lives, this thread drives the network instead of the driver's thread.
  class Driving;

  Fabric(const BackendContext& context, std::size_t heap_bytes, node::Rendezvous rendezvous);
  static std::size_t notices_offset(int num_ranks);
  static std::size_t control_bytes(int num_ranks);
  Status join_network(const BackendContext& context, const std::vector<RankPlace>& places, const Status& my_status);
  std::byte* memory_of(int rank) const;
  Control& control(int rank) const;
  /// Offset of a word of `arrived` in a control area.
  static std::size_t arrived_offset(int slot, std::uint64_t number, std::size_t step);
  /// Entries of the team in that slot, in the memory of `rank`, by rank of the world.
  Entry* entries(int rank, int slot) const;
  /// Sets the word of `rank` at `offset` of its control area.
  Status set(int rank, std::size_t offset, std::uint64_t value, std::string_view operation);
  /// Kinds of meetings, a bit each: ranks find out whether all of them have the same kind.
  enum class Meeting : std::uint64_t {
    kLast = 0,  ///< before they leave: accepts any kind from the others
    kBarrier = 1,
    kExchange = 2,  ///< before entries are shown
    kShown = 4,     ///< after entries are shown
  };
  /// An error other than those of a wait reports that other ranks began a meeting of another kind; the meeting is then
  /// over.
  Status wait_for_mates(const TeamState& team, std::string_view operation, Meeting kind);
  Status refuse(const TeamState& team, std::string_view operation, std::string_view earlier) const;
  Status show(const TeamState& team, const Entry& mine, std::string_view operation);
  Status wait_unannounced(const Wait& wait, const std::function<bool()>& done, bool* announced);

  // fabric_losses.cpp

  /// Notice of `rank`: its own, or on another node this rank's copy.
  Notice& notice(int rank) const;
  std::size_t offset_in_notice(const void* part) const;
  bool is_through(const TeamState& team, int rank) const;
  void note_through(const TeamState& team);
  std::optional<Finding> loss_of(int rank) const;
  std::optional<Finding> find_verdict(const TeamState& team) const;
  std::optional<Finding> cause_of(int rank, std::span<const int> ranks, const TeamState* team) const;
  /// Loss that makes a wait for `ranks` vain; `team`: see Wait.
  std::optional<Finding> find_loss(std::span<const int> ranks, const TeamState* team) const;
  Status status_of(const Finding& finding) const;
  void tell(std::span<const int> ranks, std::uint64_t& word, std::uint64_t value);
  /// Shares the first loss that this rank has found.
  void note_loss(const Finding& loss);
  /// Tells the mates that this rank waits in the team's current meeting.
  void announce(const TeamState& team, int awaited);
  void retract(const TeamState& team);
  int find_late(const TeamState& team, int awaited) const;
  /// Error with which a collective call of the team ends: names the same rank as those of the mates, which are told.
  Status conclude(const TeamState& team, std::string_view operation, const Status& status);
  /// Tells the others which meetings this rank is through. The end of the connection follows.
  void say_goodbye();

  bool sleep_until_rung(const Wait& wait, const std::function<bool()>& done, std::int64_t timeout_ns) const;

  Topology topology_;
  std::int64_t timeout_ns_;
  std::size_t heap_bytes_;
  bool spins_;  // the host has a core for each thread
  std::vector<int> all_ranks_;
  node::Peers peers_;
  std::byte* memory_ = nullptr;  // control area and heap of this rank, in its arena
  std::size_t arena_offset_ = 0;
  std::unique_ptr<Driver> driver_;
  std::uint64_t num_announcements_ = 0;
};

}  // namespace ferry::one_sided

#endif  // FERRY_ONE_SIDED_FABRIC_HPP
