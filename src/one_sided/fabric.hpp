#ifndef FERRY_ONE_SIDED_FABRIC_HPP
#define FERRY_ONE_SIDED_FABRIC_HPP

/// The host's side of a OneSided, on every backend: this rank's host heap and those of its node that it maps, the
/// driver of the network where there are several nodes, meetings of hosts, and who is lost.
///
/// The heap lies behind a control area, at the same offset in each rank's arena; both together are the memory that
/// engines of other nodes reach. Control words:
///
///   word             writer      readers  order                    publishes
///   arrived[t][n][s] team mates  owner    exchange / acquire       what the mate did before its barrier (in its node);
///                                                                  t: the slot that the owner keeps the team in, n: of
///                                                                  meetings of odd and of even number
///   finished         all ranks   owner    exchange / acquire       that all ranks have come to the last barrier
///   entries[t]       team mates  owner    before a barrier         what a rank shows in an exchange of the team
///   doorbell         all         owner    fetch_add seq_cst, futex nothing; wakes sleepers
///   num_sleepers     owner       all      seq_cst                  nothing; nobody is woken while it is 0
///   watched          owner       all      seq_cst                  nothing; a single sleeper is woken for that word
///                                                                  alone. Of several one may be missed, as they leave:
///                                                                  naps are short
///
/// A barrier disseminates: in step s a rank sets arrived[t][n][s] of the team mate 2^s places further on to the number
/// of the barrier and the kinds of meetings that it has heard of, and waits until its own has that number. Each word
/// has one writer, who sets it again two barriers later: then the owner has come to the one between, so it has seen
/// what was there. Hence no order of the network matters.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
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

namespace ferry::one_sided {

class Fabric {
 public:
  /// Collective: succeeds on all ranks or fails on all. `heap_bytes`: of the host heap, a multiple of a page; 0: none.
  static Result<std::unique_ptr<Fabric>> create(const BackendContext& context, std::size_t heap_bytes);
  ~Fabric();
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  const Topology& topology() const { return topology_; }
  std::int64_t timeout_ns() const { return timeout_ns_; }
  std::span<const int> everybody() const { return everybody_; }
  bool in_node(int rank) const { return topology_.node_of(rank) == topology_.node_of(topology_.rank); }

  /// This rank's host heap, zeroed at creation, mapped shared, page-aligned.
  std::byte* heap() const { return peer_heap(topology_.rank); }
  std::size_t heap_bytes() const { return heap_bytes_; }
  /// That of a rank of this node, null for others.
  std::byte* peer_heap(int rank) const;
  /// Where a heap's offset is in the memory of the engine, for Request::offset.
  std::size_t engine_offset(std::size_t heap_offset) const;

  /// The ranks of this node, and links to those that are other processes.
  node::Peers& peers() { return peers_; }
  /// Null with one node.
  Driver* driver() { return driver_.get(); }

  /// Wakes sleeping threads of a rank of this node, this rank included, after the word at `offset` of its memory
  /// (engine_offset) has changed. kAnyWord: after something has.
  void ring(int rank, std::size_t offset) const;

  /// Ok, or kPeerLost / kTransport for a rank that is lost, the first of these. Costs system calls.
  /// `may_have_left`: see Wait.
  Status presence(std::span<const int> ranks, const std::function<bool(int rank)>& may_have_left = {}) const;
  Status presence() const { return presence(everybody_); }

  /// Gives a request to the driver, driving the network until it can be issued.
  /// @errors kTimeout; to a lost peer its status: the request was not issued and its completion is told nothing
  Status issue(const Request& request, std::string_view operation);

  /// Waits until `done()`, driving the network meanwhile.
  /// @errors kTimeout; kPeerLost, kTransport: one of `ranks` is lost, which is looked for now and then
  struct Wait {
    std::string_view operation;
    std::function<std::string()> what;  ///< it waits for, for messages: "rank 3's answer to a get"
    std::span<const int> ranks{};
    std::int64_t timeout_ns = 0;
    int culprit = -1;             ///< of a kTimeout
    std::size_t word = kAnyWord;  ///< what it waits for is this word of this rank's memory (engine_offset) alone
    /// Whether a rank of the node may have left because it has done what this waits for; null: none may.
    std::function<bool(int rank)> may_have_left{};
  };
  Status wait(const Wait& wait, const std::function<bool()>& done);

  /// Waits until everything that this rank gave the driver by its calls is complete, and fences the processor's stores.
  Status quiet(std::string_view operation);

  /// Hosts of the team meet. What they stored, or completed by quiet, before is visible to all after. One that ends by
  /// its deadline is taken up by the next.
  /// @errors as wait; kInvalidArgument: an exchange of the team is not over, of which mates may count on the rest
  Status barrier(const TeamState& team, std::string_view operation);
  /// See Backend::exchange; without quiet. One that ends by its deadline goes on where it was when it is made again
  /// with an equal entry, whatever other teams did meanwhile; with another entry if no mate can have seen the first.
  /// @errors as wait; kInvalidArgument: a barrier of the team, or an exchange of another entry, is not over
  Result<std::vector<Entry>> exchange(const TeamState& team, const Entry& mine, std::string_view operation);

  /// The last meeting of all ranks, after which some may be gone before others have noticed it; then closes the network
  /// and tells the node that this rank has left.
  Status leave(const TeamState& world, std::string_view operation);
  /// The rest of it, where others are not met: they find this rank lost. No call follows; again it does nothing.
  void abandon();

 private:
  /// While it lives this thread, not the driver's, moves the network.
  class Driving;

  Fabric(const BackendContext& context, std::size_t heap_bytes, node::Rendezvous rendezvous);
  static std::size_t control_bytes(int num_ranks);
  Status join_network(const BackendContext& context, const std::vector<RankPlace>& places, const Status& my_status);
  std::byte* memory_of(int rank) const;
  Control& control(int rank) const;
  /// Of the word of `arrived` in a control area.
  static std::size_t arrived_offset(int slot, std::uint64_t number, std::size_t step);
  /// Of the team in that slot, in the memory of `rank`, by rank of the world.
  Entry* entries(int rank, int slot) const;
  /// Sets the word of `rank` at `offset` of its control area.
  Status set(int rank, std::size_t offset, std::uint64_t value, std::string_view operation);
  /// What ranks meet for, a bit each: they find out whether it is the same for all of them.
  enum class Meeting : std::uint64_t {
    kLast = 0,  ///< before they leave: meets whatever others meet for
    kBarrier = 1,
    kExchange = 2,  ///< before entries are shown
    kShown = 4,     ///< and after that
  };
  /// Another error than those of waits says that others met for something else; then the meeting is over.
  Status wait_for_mates(const TeamState& team, std::string_view operation, Meeting kind);
  Status refuse(const TeamState& team, std::string_view operation, std::string_view earlier) const;
  Status show(const TeamState& team, const Entry& mine, std::string_view operation);
  bool sleep_until_rung(const Wait& wait, const std::function<bool()>& done, std::int64_t timeout_ns) const;

  Topology topology_;
  std::int64_t timeout_ns_;
  std::size_t heap_bytes_;
  bool spins_;  // the host has a core for each thread
  std::vector<int> everybody_;
  node::Peers peers_;
  std::byte* memory_ = nullptr;  // of this rank: control area and heap, in its arena
  std::size_t arena_offset_ = 0;
  std::unique_ptr<Driver> driver_;
};

}  // namespace ferry::one_sided

#endif  // FERRY_ONE_SIDED_FABRIC_HPP
