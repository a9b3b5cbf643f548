#ifndef FERRY_NODE_PEERS_HPP
#define FERRY_NODE_PEERS_HPP

/// One rank's view of the ranks of its node: flags, doorbells, error records, and addresses in each other's memory.
/// Nothing here waits for a peer or acts on its state; src/call does. See control_block.hpp for the flags and their
/// order. Ranks are numbered as in the group.

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "core/agreement.hpp"
#include "core/error_record.hpp"
#include "core/flight_recorder.hpp"
#include "node/control_block.hpp"
#include "node/rendezvous.hpp"

namespace ferry::node {

class Peers {
 public:
  Peers(int rank, int first_rank, Rendezvous rendezvous);
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  int rank() const { return rank_; }
  /// Number of ranks of this node.
  int num_ranks() const { return static_cast<int>(peers_.size()); }
  int first_rank() const { return first_rank_; }
  int end_rank() const { return first_rank_ + num_ranks(); }
  bool includes(int rank) const { return rank >= first_rank_ && rank < end_rank(); }
  const Peer& peer(int rank) const { return peers_[static_cast<std::size_t>(rank - first_rank_)]; }
  Arena& arena() { return *arena_; }
  const Arena& arena() const { return *arena_; }
  const std::shared_ptr<Arena>& shared_arena() const { return arena_; }

  /// Records this rank's calls and waits.
  FlightRecorder& recorder() { return recorder_; }
  const FlightRecorder& recorder() const { return recorder_; }
  /// Flight record of a rank of this node.
  const FlightRecord& flight_of(int rank) const { return control(rank).flight; }

  /// Number of the current call, from 1; 0 before the first.
  std::uint64_t call() const { return call_; }
  /// Starts the next call: publishes `descriptor` to the peers.
  void open(const CallDescriptor& descriptor);
  /// Descriptor in the current call, valid once the rank has reached kDescribed.
  const CallDescriptor& descriptor_of(int rank) const { return control(rank).descriptors[call_ % 2]; }
  /// Adds a location to this rank's descriptor; post(kStaged) publishes it.
  void set_staged(const Location& staged) { control(rank_).descriptors[call_ % 2].staged = staged; }
  /// Announces that this rank reached `phase` of the current call.
  void post(Phase phase);
  bool reached(int rank, Phase phase) const {
    return control(rank).flag(phase).load(std::memory_order_acquire) >= call_;
  }

  /// Value of this rank's doorbell. Read it before the flags whose change is to end the next sleep.
  std::uint32_t doorbell() const { return control(rank_).doorbell.load(std::memory_order_seq_cst); }
  /// Sleeps until `num_rings` peers have rung since the doorbell was `rings`, at most `timeout_ns`.
  void sleep(std::uint32_t rings, std::uint32_t num_rings, std::int64_t timeout_ns);
  /// Wakes this rank, from another thread of its process.
  void ring_self() { ring(control(rank_), false); }

  /// Shows that this rank waits for others.
  void beat() { control(rank_).beats.fetch_add(1, std::memory_order_relaxed); }
  std::uint64_t beats_of(int rank) const { return control(rank).beats.load(std::memory_order_relaxed); }
  /// Counts work done inside a call, so that peers can distinguish a slow rank from a stuck one.
  void count_progress() { control(rank_).progress.fetch_add(1, std::memory_order_relaxed); }
  std::uint64_t progress_of(int rank) const { return control(rank).progress.load(std::memory_order_relaxed); }

  /// Publishes the error for which this rank gives up, and wakes the peers. At most once.
  void report_error(const ErrorRecord& record);
  /// Error of a peer that gave up, if one did.
  std::optional<ReportedError> reported_error() const {
    return error_reported_by(std::numeric_limits<std::uint64_t>::max());
  }
  /// Error of a peer that gave up in the current call or before, if one did. A peer that gave up later has finished
  /// this call.
  std::optional<ReportedError> error_in_this_call() const { return error_reported_by(call_); }
  /// Whether any rank has given up, this one included.
  bool anyone_gave_up() const;
  bool gave_up(int rank) const { return control(rank).error_set.load(std::memory_order_acquire) != 0; }
  /// Posts nothing more; peers that wait for this rank are notified.
  void leave();
  /// "has destroyed its group", "has died", "is absent"; empty while the rank is there.
  std::string_view loss_of(int rank) const;
  /// Whether the rank was there when the group formed, and is lost.
  bool was_lost(int rank) const { return !peer(rank).is_absent && !loss_of(rank).empty(); }
  /// Ranks of other processes that have ended without leaving, ascending.
  std::vector<int> ended_ranks() const;

  /// Location of [data, …) for the peers: in the arena, or an address of this process.
  Location locate(const std::byte* data, std::int64_t num_rows, std::int64_t row_bytes,
                  std::int64_t stride_bytes) const;
  /// Whether `rank` can reach this location of this rank; equally, whether this rank can reach it as a location of
  /// `rank`.
  bool reachable(const Location& location, int rank) const;
  /// Part of a peer's location that this rank is about to access.
  struct Extent {
    std::int64_t num_rows = 0;
    std::int64_t row_bytes = 0;
  };
  /// Pointer to a peer's location; null unless it is reachable, holds `extent`, and is inside the peer's arena.
  /// Whatever a faulty peer publishes, the result cannot make this rank access other memory.
  std::byte* resolve(const Location& location, int rank, const Extent& extent) const;

 private:
  std::optional<ReportedError> error_reported_by(std::uint64_t last_call) const;
  ControlBlock& control(int rank) const { return peer(rank).arena->control(); }
  static void ring(ControlBlock& theirs, bool force);
  void ring_all(bool force);

  int rank_;
  int first_rank_;
  std::shared_ptr<Arena> arena_;
  std::vector<Peer> peers_;  // by rank - first_rank_
  FlightRecorder recorder_;
  std::uint64_t call_ = 0;
};

}  // namespace ferry::node

#endif  // FERRY_NODE_PEERS_HPP
