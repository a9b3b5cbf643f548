#ifndef FERRY_RAIL_RAILS_HPP
#define FERRY_RAIL_RAILS_HPP

/// A rank's connections to its rail peers: the ranks with the same index in the other nodes. They carry call headers
/// (which call a rank makes), error records (why it gave up), and payload through rings. Peers are identified by their
/// node's index. Nothing here waits.
///
///   channel     value                              published by it
///   kHello      1                                  nothing; the connection works
///   kCall       number of the call                 the header of that call
///   kError      1                                  the error record
///   kChunks     chunks ever sent to this peer      those chunks
///   kCredits    chunks ever used up here           nothing; the sender may fill their memory again
///   kBeats      beats, and work done (WaitSign)    nothing; the sender waits for others
///   kKernelChunks, kKernelCredits                  as kChunks and kCredits, of rings between kernels
///
/// Every value has one writer and only grows, so nothing is reset between calls. A rank that leaves sets kLeft in the
/// values of kCall and kError and closes its rings: what it sent before is complete by then.

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
  /// The proxy's thread has a core to itself.
  bool spins = true;
  /// Where the ranks of the group run.
  std::vector<RankPlace> places{};
  /// Of the rank's GPU, for the network card next to it; empty: it has none.
  std::string gpu_pci_address{};
  /// Not empty: the network's memory, Rails::memory_bytes of it, and the words of the rings, by node, both zeroed. They
  /// outlive the Rails.
  std::span<std::byte> memory{};
  net::RingWords* words = nullptr;

  /// Rings of kernels beside the hosts', with chunks in GPU memory that network cards reach: Rails::rings_bytes of it.
  /// Without memory there are none, and kernels use those of the hosts.
  struct GpuRings {
    RingShape shape;
    std::span<std::byte> memory{};
    net::RingWords* words = nullptr;         ///< as above
    std::function<Status()> make_visible{};  ///< net::Proxy::attach_kernel_ring
  };
  GpuRings gpu{};
};

class Rails {
 public:
  /// Collective: succeeds on all ranks or fails on all, with `my_status` if that is an error. `wake_rank` is called
  /// from another thread when something has arrived.
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
  /// The other nodes, from the next one on, so that not all ranks begin with the same peer.
  std::span<const int> peer_nodes() const { return peer_nodes_; }

  /// Begins to connect and greets all peers.
  Status start();
  /// Whether the peer's greeting has arrived.
  bool greeted(int node) const;
  /// Once all peers have connected: whether this rank's thread may drive the network itself if that is faster.
  void allow_inline_progress(bool allowed);

  /// Sends all rail peers the header of call number `header.call`.
  void announce(const CallHeader& header);
  /// Whether the peer's header of call number `call` has arrived.
  bool has_header(int node, std::uint64_t call) const;
  /// The headers of a call as the peers wrote them, by node, `header_stride` bytes apart; none of this rank's own. A
  /// peer may change them at any moment.
  const std::byte* headers(std::uint64_t call) const;
  std::size_t header_stride() const { return memory_.header_stride(); }

  /// The rings shared with the peer in another node.
  Ring& ring(int node) { return *rings_[static_cast<std::size_t>(node)]; }
  const Ring& ring(int node) const { return *rings_[static_cast<std::size_t>(node)]; }
  /// Bytes of items that a chunk holds.
  std::size_t chunk_capacity() const { return memory_.ring_shape().chunk_bytes - kChunkHeaderBytes; }

  /// The chunks of all rings that kernels use: those with each peer in turn, by node, this rank's own left out.
  struct Chunks {
    std::byte* in = nullptr;
    std::byte* out = nullptr;
    RingShape shape;
  };
  Chunks chunks() const {
    const RailMemory& memory = gpu_memory_.has_value() ? *gpu_memory_ : memory_;
    return {memory.at(memory.chunks_in()), memory.at(memory.chunks_out()), memory.ring_shape()};
  }
  /// Whether kernels have rings of their own, in GPU memory.
  bool has_gpu_rings() const { return gpu_memory_.has_value(); }
  /// Of the proxy. Any thread.
  void keep_polling(bool polling) { proxy_->keep_polling(polling); }

  /// While one lives, this rank's thread drives the network itself, if allow_inline_progress() found that faster. For
  /// waits in which only rail peers matter: only they wake this rank then.
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
  /// Sleeps until the network has something to do, at most `timeout_ns`. False at once if this thread does not drive
  /// it: the proxy wakes the rank then.
  bool sleep(std::int64_t timeout_ns) { return proxy_->sleep(timeout_ns); }

  /// Shows all rail peers that this rank waits for others, and how much work it has done inside calls.
  void beat(std::uint64_t progress);
  /// What the peer has shown last.
  struct WaitSign {
    std::uint64_t beats = 0;
    std::uint64_t progress = 0;  ///< its lowest bits
  };
  WaitSign wait_sign(int node) const;

  /// Sends all rail peers the reason why this rank gives up.
  void report_error(const ErrorRecord& record);
  /// Why a rail peer gave up, if one did.
  std::optional<ReportedError> reported_error() const;
  /// Ok while `rank`, of another node, can be expected to do its part. kPeerLost, kTransport: what happened to it.
  Status presence(int rank) const;
  /// Sends nothing more; peers that wait for this rank are notified.
  void leave();
  /// From now on the destructor waits only as long as responsive peers need to answer.
  void expect_no_answers();

  /// Bytes of the network's memory, GPU memory included.
  std::size_t memory_bytes() const {
    return memory_.size_bytes() + (gpu_memory_.has_value() ? gpu_memory_->size_bytes() : 0);
  }
  /// The same before there is a group.
  static std::size_t memory_bytes(const Topology& topology, const RingShape& ring);
  /// Of rings alone.
  static std::size_t rings_bytes(const Topology& topology, const RingShape& ring);
  std::string_view engine_name() const { return network_.engine_name; }
  /// Devices through which ranks of other hosts reach this one; empty if no rail peer is on another host.
  const std::string& net_devices() const { return network_.devices.devices; }
  /// For errors: the engine, its devices and what decided about them.
  std::string describe_network() const { return network_.describe(); }
  net::PeerTraffic traffic(int node) const { return proxy_->traffic(node); }
  /// How the network reaches the rail peers; Path::peer is a node. Waits for the proxy.
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
  std::optional<RailMemory> gpu_memory_;         // rings alone
  Network network_;                              // its engine is the proxy's
  std::unique_ptr<net::RingWords[]> own_words_;  // by node; outlives the proxy
  net::RingWords* words_ = nullptr;
  std::vector<std::unique_ptr<Ring>> rings_;  // by node; null for this rank's own
  std::uint64_t num_announced_ = 0;
  std::uint64_t num_beats_ = 0;
  std::atomic<bool> has_reported_{false};  // a thread other than the rank's may report
  /// True if all nodes are on this host, it has fewer cores than ranks, and puts are copies that this rank's thread can
  /// make just as well: 8 ranks of two nodes on 2 cores moved 9.1 GB/s through UCX's shared memory with a thread for
  /// each proxy, and 11.9 GB/s without. Over TCP the kernel works in parallel with the rank, and a proxy that feeds it
  /// continuously was faster: 2.8 against 2.5 GB/s (benchmarks/rail_stage.cpp, medians of 5 and 3 runs in turn). Other
  /// numbers of cores were not measured.
  bool inline_progress_ = false;
  std::unique_ptr<net::Proxy> proxy_;
};

}  // namespace ferry::rail

#endif  // FERRY_RAIL_RAILS_HPP
