#ifndef FERRY_CALL_CALL_SYNC_HPP
#define FERRY_CALL_CALL_SYNC_HPP

/// Collective calls of a rank together with all others: agreement at the start, waits inside, and one error for all
/// when a rank fails. Over several nodes every rank learns the calls of all others from its rail peers and then from
/// its node; it communicates only with the ranks of its rail and of its node.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "call/group_state.hpp"
#include "call/kernel_rings.hpp"
#include "core/rank_place.hpp"

namespace ferry::call {

class CallSync {
 public:
  /// Collective, see core/create_together.hpp. `source`: of the rings of kernels, given by all ranks or none; only in
  /// groups of several nodes.
  static Result<std::unique_ptr<CallSync>> create(const BackendContext& context,
                                                  const KernelRingsSource* source = nullptr);
  CallSync(const CallSync&) = delete;
  CallSync& operator=(const CallSync&) = delete;
  /// See Backend::created.
  void created() { state_.created(); }

  int rank() const { return state_.rank(); }
  const Topology& topology() const { return state_.topology(); }
  GroupState& state() { return state_; }
  std::string_view operation() const { return state_.operation(); }
  const std::vector<std::int64_t>& wait_times_ns() const { return state_.wait_times_ns(); }
  node::Peers& peers() { return state_.peers(); }
  const node::Peers& peers() const { return state_.peers(); }
  /// Only in groups of several nodes.
  rail::Rails& rails() { return state_.rails(); }
  bool has_rails() const { return state_.has_rails(); }
  /// Bytes of the arena for call headers from other nodes: two blocks.
  std::size_t headers_bytes() const { return headers_bytes(topology()); }
  static std::size_t headers_bytes(const Topology& topology) {
    return topology.num_nodes() > 1 ? 2 * headers_block_bytes(topology) : 0;
  }
  /// Group::network_usage; waits until everything given to the network before is counted.
  NetworkUsage network_usage();
  /// MemoryUsage::network_bytes of a group of ranks without kernels.
  static std::size_t network_bytes(const Topology& topology);

  /// Starts a collective call: sends `descriptor` to all ranks, waits for theirs, and checks that all agree. Afterwards
  /// the descriptors of this node's ranks are valid until the next call.
  Status begin(node::CallDescriptor descriptor);
  /// Fields of a rank's descriptor that a call on any node may depend on. Only in groups of several nodes.
  struct PeerCall {
    std::int64_t max_recv_rows = 0;
    std::int64_t num_entries = 0;
  };
  const PeerCall& call_of(int rank) const { return peer_calls_[static_cast<std::size_t>(rank)]; }

  /// Hosts and nodes of the group's ranks.
  const std::vector<RankPlace>& places() const { return places_; }

  void post(node::Phase phase) { state_.peers().post(phase); }
  /// Waits until every rank of this node that `awaited` selects (by index in the node; null: all) has reached `phase`.
  /// Absent ranks are not waited for.
  Status wait(node::Phase phase, const std::vector<bool>* awaited = nullptr);

  // See GroupState.
  const Status& broken() const { return state_.broken(); }
  Status fail(ErrorCode code, int culprit, std::string_view message) { return state_.fail(code, culprit, message); }
  Status give_up_on(int suspect, std::string_view what) { return state_.give_up_on(suspect, what); }
  Status confirm_reads() { return state_.confirm_reads(); }
  void leave() { state_.leave(); }

  /// Breaks the group because this rank ran out of memory inside a call.
  Status out_of_memory(Operation operation);
  /// Breaks the group because `rank` published a location outside its memory.
  Status bad_location(Operation operation, int rank);

 private:
  CallSync(const BackendContext& context, node::Rendezvous rendezvous) : state_(context, std::move(rendezvous)) {}
  Status connect_rails(const BackendContext& context, const KernelRingsSource* source);
  Status connect_host_rails(const BackendContext& context, const KernelRingsSource* source, const Status& my_status);
  Status await_greetings();
  Status begin_over_nodes(node::CallDescriptor descriptor);
  Status await_headers();
  void publish_headers();
  Status collect_headers();
  /// Checks that all ranks made the same call.
  Status agree(std::span<const CallRecord* const> records);
  static std::size_t headers_block_bytes(const Topology& topology) {
    return static_cast<std::size_t>(topology.num_nodes()) * rail::kCallHeaderStride;
  }
  /// Two blocks alternate by call: slower ranks may still read the headers of the previous call.
  std::byte* headers_block(std::uint64_t call) const { return headers_ + call % 2 * headers_block_bytes(topology()); }

  GroupState state_;
  std::vector<RankPlace> places_;
  std::string why_host_memory_;  ///< why rings are not in GPU memory; empty: they are, or there are none
  /// In the arena, where it stays when this rank leaves: ranks of this node may still read the last call's headers.
  std::byte* headers_ = nullptr;
  std::vector<rail::CallHeader> received_;  // by rank; scratch of begin
  std::vector<PeerCall> peer_calls_;        // by rank
};

}  // namespace ferry::call

#endif  // FERRY_CALL_CALL_SYNC_HPP
