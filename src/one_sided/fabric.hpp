#ifndef FERRY_ONE_SIDED_FABRIC_HPP
#define FERRY_ONE_SIDED_FABRIC_HPP

/// The host's side of a OneSided, on every backend: this rank's host heap and those of its node that it maps, the
/// driver of the network where there are several nodes, meetings of hosts, and who is lost.
///
/// The heap lies behind a control area, at the same offset in each rank's arena; both together are the memory that
/// engines of other nodes reach. Control words:
///
///   word             writer      readers  order                    publishes
///   arrived[t][s]    team mates  owner    fetch_add / acquire      what the mate did before its barrier (in its node)
///   entries          all ranks   owner    before a barrier         what a rank shows in an exchange
///   doorbell         all         owner    fetch_add seq_cst, futex nothing; wakes sleepers
///   num_sleepers     owner       all      seq_cst                  nothing; nobody is woken while it is 0
///
/// A barrier disseminates: in step s a rank adds 1 to arrived[t][s] of the team mate 2^s places further on, and waits
/// until its own has reached the number of the barrier. Adds commute, so no order of the network matters, and each word
/// has one writer per team.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "core/backend.hpp"
#include "ferry/status.hpp"
#include "node/peers.hpp"
#include "one_sided/backend.hpp"
#include "one_sided/driver.hpp"

namespace ferry::one_sided {

class Fabric {
 public:
  /// Collective: succeeds on all ranks or fails on all. `heap_bytes`: of the host heap, a multiple of a page; 0: none.
  /// `operation`: the call, for messages.
  static Result<std::unique_ptr<Fabric>> create(const BackendContext& context, std::size_t heap_bytes);
  ~Fabric();
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  const Topology& topology() const { return topology_; }
  std::int64_t timeout_ns() const { return timeout_ns_; }
  bool in_node(int rank) const { return topology_.node_of(rank) == topology_.node_of(topology_.rank); }

  /// This rank's host heap, zeroed at creation, mapped shared, page-aligned.
  std::byte* heap() const { return peer_heap(topology_.rank); }
  std::size_t heap_bytes() const { return heap_bytes_; }
  /// That of a rank of this node, null for others.
  std::byte* peer_heap(int rank) const;
  /// Where a heap's offset is in the memory of the engine, for Request::offset.
  std::size_t engine_offset(std::size_t heap_offset) const;
  /// Where the engine's memory at `offset` is here.
  std::byte* at_engine_offset(std::size_t offset) const;

  /// Null with one node.
  Driver* driver() { return driver_.get(); }

  /// Wakes sleeping threads of a rank of this node, this rank included, after a word of its heap has changed.
  void ring(int rank) const;

  /// Ok, or kPeerLost / kTransport for the first rank found to be lost, of all ranks or one. Costs system calls.
  Status presence() const;
  Status presence(int rank) const;

  /// Issues a request, driving the network until it can be. To a lost peer: its status.
  Status issue(const Request& request, std::string_view operation);

  /// Waits until `done(context)`, driving the network meanwhile; `presence` is looked at now and then.
  /// @errors kTimeout, with `what` it waited for; kPeerLost
  struct Wait {
    std::string_view operation;
    bool (*done)(void* context) = nullptr;
    void* context = nullptr;
    std::int64_t timeout_ns = 0;
    int peer = -1;  ///< the rank that is waited for, if it is one: only its loss ends the wait
  };
  Status wait(const Wait& wait);

  /// Waits until everything that this rank gave the driver by its calls is complete, and fences the processor's stores.
  Status quiet(std::string_view operation);

  /// Hosts of the team meet. What they stored, or completed by quiet, before is visible to all after.
  Status barrier(const TeamState& team, std::string_view operation);
  /// See Backend::exchange; without quiet.
  Result<std::vector<Entry>> exchange(const TeamState& team, const Entry& mine, std::string_view operation);

 private:
  struct Control;

  Fabric(const BackendContext& context, std::size_t heap_bytes, node::Rendezvous rendezvous);
  Control& control(int rank) const;

  Topology topology_;
  std::int64_t timeout_ns_;
  std::size_t heap_bytes_;
  node::Peers peers_;
  std::unique_ptr<Driver> driver_;
};

}  // namespace ferry::one_sided

#endif  // FERRY_ONE_SIDED_FABRIC_HPP
