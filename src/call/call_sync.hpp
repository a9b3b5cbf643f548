#ifndef FERRY_CALL_CALL_SYNC_HPP
#define FERRY_CALL_CALL_SYNC_HPP

/// How a rank makes collective calls together with all others: agreement at the start, waiting inside, and one error for
/// all when a rank fails. Over several nodes every rank learns what all others call by way of its rail peers and then of
/// its node; no rank talks to more than its rail and its node.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/backend.hpp"
#include "node/peers.hpp"
#include "rail/rails.hpp"

namespace ferry::call {

class CallSync {
 public:
  /// Collective: succeeds on all ranks or fails on all.
  static Result<std::unique_ptr<CallSync>> create(const BackendContext& context);
  ~CallSync();
  CallSync(const CallSync&) = delete;
  CallSync& operator=(const CallSync&) = delete;

  int rank() const { return topology_.rank; }
  const Topology& topology() const { return topology_; }
  /// The ranks of this node.
  node::Peers& peers() { return peers_; }
  const node::Peers& peers() const { return peers_; }
  /// The ranks of this rail. Only in groups of several nodes.
  rail::Rails& rails() { return *rails_; }
  bool has_rails() const { return rails_ != nullptr; }
  /// Of the arena, for headers from other nodes.
  std::size_t headers_bytes() const { return has_rails() ? 2 * headers_block_bytes() : 0; }

  /// Name of the current call; empty before the first.
  std::string_view operation() const { return operation_; }
  /// Why the group is broken; ok while it is not.
  const Status& broken() const { return broken_; }

  /// Starts a collective call: shows `descriptor` to all ranks, waits for theirs, and checks that all agree. Afterwards
  /// the descriptors of this node's ranks are valid until the next call.
  Status begin(node::CallDescriptor descriptor);
  /// What a rank of any node gave to `begin`: those fields on which a call may depend. Only in groups of several nodes.
  struct PeerCall {
    std::int64_t max_recv_rows = 0;
    std::int64_t num_entries = 0;
  };
  const PeerCall& call_of(int rank) const { return peer_calls_[static_cast<std::size_t>(rank)]; }

  void post(node::Phase phase) { peers_.post(phase); }
  /// Waits until every rank of this node that `awaited` selects (by index in the node; all if null) has reached `phase`.
  Status wait(node::Phase phase, const std::vector<bool>* awaited = nullptr);

  /// Breaks the group. Ranks that wait learn of it at once (in 20 ms where they drive the network themselves) with
  /// `message`, which names `culprit` (-1: none). `note` is added to this rank's own Status only.
  Status fail(ErrorCode code, int culprit, std::string_view message, std::string_view note = {});
  /// Breaks the group because a wait outside of this class expired. Blames the rank that another has blamed already,
  /// else a rank that is lost, else `suspect`. `what` describes the wait: "dispatch: timed out after 50 ms waiting for …".
  Status give_up_on(int suspect, std::string_view what);
  /// Breaks the group because this rank ran out of memory inside of a call.
  Status out_of_memory(Operation operation);
  /// Breaks the group because `rank` published a location outside of its memory.
  Status bad_location(Operation operation, int rank);

  /// Posts nothing more; ranks that wait for this one learn of it.
  void leave();

 private:
  friend class Wait;

  CallSync(const BackendContext& context, node::Rendezvous rendezvous);
  Status connect_rails(const BackendContext& context);
  Status await_greetings();
  Status begin_over_nodes(node::CallDescriptor descriptor);
  Status await_headers();
  void publish_headers();
  Status collect_headers();
  std::size_t headers_block_bytes() const {
    return static_cast<std::size_t>(topology_.num_nodes()) * rails_->header_stride();
  }
  std::byte* headers_block() const { return headers_ + peers_.call() % 2 * headers_block_bytes(); }

  // Whom to blame; blame.cpp.
  std::string describe_call() const;
  Status adopt_reported_error();
  Status check_presence(int rank) const;
  Status fail_for_lost(int rank, const Status& presence, std::string_view waiting_for);
  Status fail_for_timeout(const std::vector<int>& missing, std::string_view waiting_for);
  std::int64_t patience_ns(const std::vector<int>& missing) const;

  Topology topology_;
  std::int64_t timeout_ns_;
  bool spins_;  // every thread of this node has a core, so that polling for a moment costs nobody
  node::Peers peers_;
  std::byte* headers_ =
      nullptr;  // two blocks that alternate by call: slower ranks may still read those of the one before
  std::unique_ptr<rail::Rails> rails_;
  std::string operation_;                   // of the current call
  std::vector<rail::CallHeader> received_;  // by rank; scratch of begin
  std::vector<PeerCall> peer_calls_;        // by rank
  Status broken_;
};

}  // namespace ferry::call

#endif  // FERRY_CALL_CALL_SYNC_HPP
