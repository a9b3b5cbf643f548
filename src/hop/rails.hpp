#ifndef FERRY_HOP_RAILS_HPP
#define FERRY_HOP_RAILS_HPP

/// A rank's connections to its rail peers: the ranks with the same index in the other nodes. Over them travel notices
/// (who calls what), verdicts (why a rank gave up), and chunks of payload through rings with credits. Peers go by their
/// node's index.
///
///   channel     value                              published by it
///   kCall       number of the call                 the notice of that call
///   kVerdict    1                                  the verdict
///   kChunks     chunks ever sent to this peer      those chunks
///   kCredits    chunks ever used up here           nothing; their places on the sender may be filled again
///
/// Every value has one writer and only grows, so nothing is cleaned between calls. kLeft is set in the values of
/// kCall, kVerdict and kChunks when the sender goes: what it sent before is complete by then.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/backend.hpp"
#include "hop/call_notice.hpp"
#include "net/proxy.hpp"
#include "node/crew.hpp"
#include "plan/rail_memory.hpp"

namespace ferry::hop {

class Rails final : public node::OtherNodes {
 public:
  /// Collective: succeeds on all ranks or fails on all. `crew` outlives the rails.
  static Result<std::unique_ptr<Rails>> create(const BackendContext& context, node::Crew& crew);
  ~Rails() override;

  int node() const { return node_; }
  int num_nodes() const { return num_nodes_; }
  /// Rank of the rail peer in `node`.
  int rank_of(int node) const { return topology_.rank - (node_ - node) * topology_.ranks_per_node; }
  const Topology& topology() const { return topology_; }

  /// Tell all rail peers of call number `notice.call`.
  void announce(const CallNotice& notice);
  /// Has the peer's notice of call number `call` arrived?
  bool heard(int node, std::uint64_t call) const;
  /// Where publish_notices() puts the notices of a call in this rank's arena, by node, as the peers wrote them; none of
  /// this rank's own.
  node::Location notices(std::uint64_t call) const;
  /// Once all are heard: copies them there, where the node's ranks can read them and no rail peer can change them.
  void publish_notices(std::uint64_t call);

  /// Room of one chunk towards `node`; null while the peer has not used up the one that was there.
  std::byte* chunk_room(int node);
  /// Send what was written there. Sets the header's chunk_idx.
  void send_chunk(int node, plan::ChunkHeader header);
  /// The oldest chunk from `node` that was not used up yet; null if none has come. Its header is as the peer wrote it.
  const std::byte* front_chunk(int node) const;
  std::uint64_t front_chunk_idx(int node) const { return ends_[static_cast<std::size_t>(node)].num_used; }
  /// The front chunk is used up.
  void release_chunk(int node);
  std::size_t chunk_capacity() const { return memory_.chunk_bytes() - plan::kChunkHeaderBytes; }
  /// Counts the exchanges with `node`, from 1: both ends make the same ones in the same order.
  std::uint64_t next_exchange(int node) { return ++ends_[static_cast<std::size_t>(node)].num_exchanges; }

  /// While one lives, this rank's thread moves the network itself, where that is faster (see drives_itself_). For waits
  /// in which only rail peers matter: those are the ones that wake this rank then.
  class OwnHands {
   public:
    explicit OwnHands(Rails& rails) : rails_(rails) {
      if (rails_.drives_itself_) rails_.proxy_->take_over();
    }
    ~OwnHands() {
      if (rails_.drives_itself_) rails_.proxy_->give_back();
    }
    OwnHands(const OwnHands&) = delete;
    OwnHands& operator=(const OwnHands&) = delete;

   private:
    Rails& rails_;
  };

  void tell(const node::Verdict& verdict) override;
  std::optional<Told> told() override;
  bool drive() override { return proxy_->drive(); }
  bool sleep(std::int64_t timeout_ns) override { return proxy_->sleep(timeout_ns); }
  Status presence(int rank) override;
  /// Post nothing more; peers that wait for this rank hear of it.
  void leave();

  /// Of the network's memory, which is the engine's.
  std::size_t memory_bytes() const { return memory_.size_bytes(); }
  /// Of the arena.
  std::size_t notices_bytes() const { return 2 * notices_block_bytes(); }
  std::size_t rings_bytes() const { return memory_.rings_bytes(); }
  std::string_view engine_name() const { return engine_name_; }
  net::PeerTraffic traffic(int node) const { return proxy_->traffic(node); }
  std::vector<net::Route> routes() { return proxy_->routes(); }

 private:
  struct End {
    std::uint64_t num_sent = 0;  // chunks
    std::uint64_t num_used = 0;
    std::uint64_t num_exchanges = 0;
  };

  Rails(const BackendContext& context, node::Crew& crew, std::byte* notices);
  std::size_t notices_block_bytes() const { return static_cast<std::size_t>(num_nodes_) * memory_.call_stride(); }
  std::byte* notices_block(std::uint64_t call) const { return notices_ + call % 2 * notices_block_bytes(); }
  /// Waits until every rail peer has said hello.
  Status greet();
  std::vector<int> ranks_of_rail() const;  // by node
  std::vector<int> peer_nodes() const;

  node::Crew& crew_;
  Topology topology_;
  int node_;
  int num_nodes_;
  plan::RailMemory memory_;
  std::byte* notices_;  // two blocks that alternate by call: slower ranks may still read those of the call before
  std::string engine_name_;
  std::vector<End> ends_;  // by node
  std::uint64_t num_announced_ = 0;
  bool has_told_ = false;
  /// All nodes are on this host, which has not even a core for each rank, and puts are copies that this rank's thread
  /// may as well make: 8 ranks of two nodes on 2 cores moved 9.1 GB/s through UCX's shared memory with a thread for
  /// each proxy, and 11.9 GB/s so. Over TCP the kernel works beside the rank, and a proxy that feeds it all the time
  /// was faster: 2.8 against 2.5 GB/s (benchmarks/rail_stage.cpp, medians of 5 and 3 runs in turn). Other numbers of
  /// cores were not measured.
  bool drives_itself_ = false;
  std::unique_ptr<net::Proxy> proxy_;
};

}  // namespace ferry::hop

#endif  // FERRY_HOP_RAILS_HPP
