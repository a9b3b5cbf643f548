#ifndef FERRY_RAIL_RAILS_HPP
#define FERRY_RAIL_RAILS_HPP

/// Connections of a rank to its rail peers: the ranks with the same index in the other nodes. They carry call headers
/// (the call that a rank makes), error records (why it gave up), and payload through rings. Peers are identified by
/// their node's index. Nothing here waits.
///
///   channel     value                              published by it
///   kHello      1                                  nothing; the connection works
///   kCall       number of the call                 the header of that call
///   kError      1                                  the error record
///   kChunks     chunks sent to this peer so far    those chunks
///   kCredits    chunks used up here so far         nothing; the sender may fill their memory again
///   kBeats      beats, and work done (WaitSign)    nothing; the sender waits for others
///   kKernelChunks, kKernelCredits                  as kChunks and kCredits, for rings between kernels
///
/// Every value has one writer and only grows, so no value is reset between calls. A rank that leaves sets kLeft in the
/// values of kCall and kError and closes its rings: everything that it sent before is complete by then.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/backend_context.hpp"
#include "core/error_record.hpp"
#include "core/rank_place.hpp"
#include "ferry/transports.hpp"
#include "net/proxy.hpp"
#include "rail/call_header.hpp"
#include "rail/network.hpp"
#include "rail/rail_memory.hpp"
#include "rail/ring.hpp"

namespace ferry::rail {

struct RailsOptions {
  RingShape ring;
  /// The proxy's thread has its own core.
  bool spins = true;
  /// Hosts and nodes of the group's ranks.
  std::vector<RankPlace> places{};
  /// PCI address of the rank's GPU, for the choice of a near network card; empty: no GPU.
  std::string gpu_pci_address{};
  /// If not empty: the network's memory, Rails::memory_bytes long, and the words of the rings, by node, both zeroed.
  /// They outlive the Rails.
  std::span<std::byte> memory{};
  net::RingWords* words = nullptr;

  /// Rings of kernels in addition to the hosts', with chunks in GPU memory that network cards reach: Rails::rings_bytes
  /// long. Without memory there are none, and kernels use the hosts' rings.
  struct GpuRings {
    RingShape shape;
    std::span<std::byte> memory{};
    net::RingWords* words = nullptr;  ///< as above
    bool read_back_writes = false;    ///< net::EngineOptions::read_back_gpu_writes
  };
  GpuRings gpu{};
  /// See NetworkParams::failed_attempt.
  Status* failed_attempt = nullptr;
};

class Rails {
 public:
  /// Collective: succeeds on all ranks or fails on all, with `my_status` if that is an error. `wake_rank` is called
  /// from another thread after an arrival.
  static Result<std::unique_ptr<Rails>> create(const BackendContext& context, const RailsOptions& options,
                                               const Status& my_status, std::function<void()> wake_rank);
  ~Rails();
  Rails(const Rails&) = delete;
  Rails& operator=(const Rails&) = delete;

  int node() const { return node_; }
  int num_nodes() const { return topology_.num_nodes(); }
  /// Rank of the rail peer in `node`.
  int rank_of(int node) const { return topology_.rank - (node_ - node) * topology_.ranks_per_node; }
  const Topology& topology() const { return topology_; }
  /// The other nodes, beginning after this one, so that not all ranks begin with the same peer.
  std::span<const int> peer_nodes() const { return peer_nodes_; }

  /// Begins to connect and greets all peers.
  Status start();
  /// Ok unless the network has reported the peer in `node` as lost.
  Status connection(int node) const { return proxy_->peer_status(node); }
  /// True if the peer's greeting has arrived.
  bool greeted(int node) const;
  /// Call after all peers have connected. `allowed`: this rank's thread may drive the network itself if that is faster.
  void allow_inline_progress(bool allowed);

  /// Sends the header of call number `header.call` to all rail peers.
  void announce(const CallHeader& header);
  /// True if the peer's header of call number `call` has arrived.
  bool has_header(int node, std::uint64_t call) const;
  /// Headers of a call as the peers wrote them, by node, `header_stride` bytes apart, without this rank's own. A peer
  /// may change its header at any moment.
  const std::byte* headers(std::uint64_t call) const;
  std::size_t header_stride() const { return memory_.header_stride(); }

  /// The rings shared with the peer in another node.
  Ring& ring(int node) { return *rings_[static_cast<std::size_t>(node)]; }
  const Ring& ring(int node) const { return *rings_[static_cast<std::size_t>(node)]; }
  /// Bytes of items that a chunk holds.
  std::size_t chunk_capacity() const { return memory_.ring_shape().chunk_bytes - kChunkHeaderBytes; }

  /// Chunks of all rings that kernels use: those of each peer in turn, by node, without this rank's own.
  struct Chunks {
    std::byte* in = nullptr;
    std::byte* out = nullptr;
    RingShape shape;
  };
  Chunks chunks() const {
    const RailMemory& memory = gpu_memory_.has_value() ? *gpu_memory_ : memory_;
    return {memory.at(memory.chunks_in()), memory.at(memory.chunks_out()), memory.ring_shape()};
  }
  /// Those of the hosts' rings.
  Chunks host_chunks() const {
    return {memory_.at(memory_.chunks_in()), memory_.at(memory_.chunks_out()), memory_.ring_shape()};
  }
  /// True if kernels have rings of their own, in GPU memory.
  bool has_gpu_rings() const { return gpu_memory_.has_value(); }
  /// See Proxy::keep_polling. Any thread.
  void keep_polling(bool polling) { proxy_->keep_polling(polling); }

  /// While one lives, this rank's thread drives the network itself, if allow_inline_progress() found that faster. For
  /// waits that only rail peers can end: only they wake this rank then.
  class InlineProgress {
   public:
    explicit InlineProgress(Rails& rails) : rails_(rails) {
      if (rails_.inline_progress_) rails_.proxy_->acquire();
    }
    ~InlineProgress() {
      if (rails_.inline_progress_) rails_.proxy_->release();
    }
    InlineProgress(const InlineProgress&) = delete;
    InlineProgress& operator=(const InlineProgress&) = delete;

   private:
    Rails& rails_;
  };
  /// Polls the network if this thread drives it. True if anything happened.
  bool progress() { return proxy_->progress(); }
  /// Sleeps until the network has work, at most `timeout_ns`. False at once if this thread does not drive it: then the
  /// proxy wakes the rank.
  bool sleep(std::int64_t timeout_ns) { return proxy_->sleep(timeout_ns); }

  /// Shows all rail peers that this rank waits for others, and the amount of work that it has done inside calls.
  void beat(std::uint64_t progress);
  /// Last wait sign of the peer.
  struct WaitSign {
    std::uint64_t beats = 0;
    std::uint64_t progress = 0;  ///< its lowest bits
  };
  WaitSign wait_sign(int node) const;

  /// Sends all rail peers the reason for which this rank gives up.
  void report_error(const ErrorRecord& record);
  /// Reason for which a rail peer gave up, if one did.
  std::optional<ReportedError> reported_error() const;
  /// Ok while `rank`, of another node, can be expected to do its part. kPeerLost, kTransport: it is lost.
  Status presence(int rank) const;
  /// Sends nothing more; peers that wait for this rank are notified.
  void leave();
  /// Limits the destructor's wait to the time that responsive peers need to answer.
  void expect_no_answers();

  /// Size of the network's memory, GPU memory included.
  std::size_t memory_bytes() const {
    return memory_.size_bytes() +
           (gpu_memory_.has_value() ? rings_bytes(topology_, gpu_memory_->ring_shape()) : std::size_t{0});
  }
  /// Same size, computed before there is a group.
  static std::size_t memory_bytes(const Topology& topology, const RingShape& ring);
  /// Size of GpuRings::memory: the rings, and the words with which the network tries cards.
  static std::size_t rings_bytes(const Topology& topology, const RingShape& ring);
  std::string_view engine_name() const { return network_.engine_name; }
  /// Devices through which ranks of other hosts reach this one; empty if no rail peer is on another host.
  const std::string& net_devices() const { return network_.devices.devices; }
  const net::CardSettings& card_settings() const { return network_.cards; }
  /// Description for errors: the engine, its devices, and the reason for their choice.
  std::string describe_network() const { return network_.describe(); }
  net::PeerTraffic traffic(int node) const { return proxy_->traffic(node); }
  /// Ways to the rail peers through the network; Path::peer is a node. Waits for the proxy.
  std::vector<net::Path> paths() { return proxy_->paths(); }

 private:
  explicit Rails(const BackendContext& context, const RailsOptions& options);
  void make_rings();
  void attach_gpu_rings(const RailsOptions::GpuRings& gpu);
  std::vector<int> ranks_of_rail() const;  // by node

  Topology topology_;
  int node_;
  std::vector<int> peer_nodes_;
  RailMemory memory_;
  std::optional<RailMemory> gpu_memory_;         // rings only
  Network network_;                              // its engine has been moved to the proxy
  std::unique_ptr<net::RingWords[]> own_words_;  // by node; outlives the proxy
  net::RingWords* words_ = nullptr;
  net::RingWords* kernel_words_ = nullptr;    // of the rings in GPU memory; null: there are none
  std::vector<std::unique_ptr<Ring>> rings_;  // by node; null for this rank's own
  std::uint64_t num_announced_ = 0;
  std::uint64_t num_beats_ = 0;
  std::atomic<bool> has_reported_{false};  // atomic, because a thread other than the rank's may report
  /// True if all nodes are on this host, it has fewer cores than ranks, and puts are copies that this rank's thread can
  /// make equally well: 8 ranks of two nodes on 2 cores moved 9.1 GB/s through UCX's shared memory with a thread for
  /// each proxy, and 11.9 GB/s without. Over TCP the kernel works in parallel with the rank, and a proxy that feeds it
  /// continuously was faster: 2.8 against 2.5 GB/s (benchmarks/rail_stage.cpp, medians of 5 and 3 runs in turn). Other
  /// numbers of cores were not measured.
  bool inline_progress_ = false;
  std::unique_ptr<net::Proxy> proxy_;
};

}  // namespace ferry::rail

#endif  // FERRY_RAIL_RAILS_HPP
