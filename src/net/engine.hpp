#ifndef FERRY_NET_ENGINE_HPP
#define FERRY_NET_ENGINE_HPP

/// Network interface of this library: puts into a peer's memory and numbers that notify the peer of them, which is all
/// that dispatch and combine need; gets, atomics on words of a peer's memory, and flushes for the one-sided layer.
/// Deliberately small: the common denominator of every fabric. docs/transport.md explains how to add an engine.
///
/// Terms: a *peer* is another end of the same network, given by index; a *channel* numbers one of several independent
/// sequences of operations to a peer.
///
/// Ordering: the peer sees `notify(peer, channel, value)` only after the bytes of every earlier `put` to it on that
/// channel; the same holds for the effect of `atomic(peer, channel, …)`. Nothing else is ordered: puts and atomics
/// among themselves, gets, different channels, and two notifies of one channel are not, so only the highest value that
/// a peer has seen counts. A `flush` completes after all earlier operations on all channels. `order_puts` orders puts
/// into GPU memory among themselves, without a message.
///
/// The rank that owns the memory applies atomics with its processor, in poll(), even if a network card could apply
/// them. They are therefore atomic with the atomics of ranks that share that memory, which no card guarantees.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/status.hpp"
#include "ferry/transports.hpp"
#include "net/remote_words.hpp"

namespace ferry::net {

/// Address that one end publishes so that others can reach it. The (authenticated) bootstrap carries it.
using Blob = std::vector<std::byte>;

/// Maximum size of an engine's blob: the bootstrap carries one per rank, with other data, in a single message of at
/// most 1 MiB.
inline constexpr std::size_t kMaxBlobBytes = 64 << 10;

/// First offset that refers to EngineOptions::gpu_memory.
inline constexpr std::size_t kGpuOffset = std::size_t{1} << 48;

/// Settings of the network cards through which peers on other hosts are reached. Defaults: the engine's choice.
struct CardSettings {
  int service_level = -1;  ///< InfiniBand service level; on RoCE v2 the Ethernet priority
  int num_paths = 0;       ///< connections of a card to a peer that puts are spread over
};

/// Last bytes of EngineOptions::gpu_memory, of which each of these ends has a part: long enough for a put to take the
/// same way as a chunk.
constexpr std::size_t gpu_probe_bytes(std::size_t num_ends) { return num_ends * (std::size_t{32} << 10); }

struct EngineOptions {
  int self = 0;          ///< index of this end among the peers
  int num_peers = 1;     ///< number of ends of the network, including this one
  int num_channels = 1;  ///< channels to each peer
  /// Memory that peers put into and that this end puts from, addressed by offset. Must outlive the engine. Empty: the
  /// engine allocates `memory_bytes` itself, see Engine::memory().
  std::span<std::byte> memory{};
  std::size_t memory_bytes = 0;
  /// GPU memory that peers' network cards write and this end's card reads, for `put` from and to offsets from
  /// kGpuOffset on. Its size is the same on all ends. Only for engines whose factory has gpu_memory(). The last
  /// gpu_probe_bytes(num_peers) belong to the engine: each end tries its card there before it greets a peer.
  std::span<std::byte> gpu_memory{};
  /// The GPU may see writes of a card into `gpu_memory` later than its writes into `memory`. Peers then read from
  /// `gpu_memory`, through the card that wrote, before they notify this end.
  bool read_back_gpu_writes = false;
  /// Network cards place the bytes of one put after those of another behind a fence: cards_keep_order().
  bool cards_keep_order = false;
  std::int64_t timeout_ns = 0;  ///< deadline of `close`
  /// Names of the peers in errors, by index: their ranks in the group. Empty: the indices.
  std::vector<int> ranks{};

  /// By peer: this end and that one exchange nothing, and both have it here. Engines need not connect them.
  /// Empty: every peer is used.
  std::vector<bool> unused{};
  /// By peer: the peer runs on this host and shares its memory and loopback interface. The engine never reaches such
  /// peers through a network. Empty: no peer is known to run on this host.
  std::vector<bool> on_this_host{};
  /// Network devices for peers on other hosts, separated by commas, with the engine's names ("eth0", "mlx5_0:1").
  /// Empty: the engine chooses.
  std::string net_devices{};
  CardSettings cards{};
  /// The engine may start a thread that receives large puts whose bytes the processor copies, so that the owner's
  /// thread only sends. For hosts with a spare core.
  bool may_start_receiver = false;

  bool uses(int peer) const { return peer != self && (unused.empty() || !unused[static_cast<std::size_t>(peer)]); }
  int rank_of(int peer) const { return ranks.empty() ? peer : ranks[static_cast<std::size_t>(peer)]; }
};

/// Ticket of an atomic that needs no answer.
inline constexpr std::uint64_t kNoTicket = 0;

/// Callbacks through which an engine reports to its owner, called inside poll().
struct EngineEvents {
  /// `peer` sent `value` on `channel`. Values may arrive out of order. The engine checks that channel and peer are in
  /// range.
  std::function<void(int peer, int channel, std::uint64_t value)> notified;
  /// The connection to `peer` is lost; reported once per peer. Later operations to the peer are dropped silently.
  /// kPeerLost if the peer closed or died, kTransport if the network failed, kUnsupported if a network card does not
  /// reach the GPU memory of one of the two: then no notify of either has reached the other.
  std::function<void(int peer, const Status& why)> lost;
  /// The get, atomic, flush or release with this ticket is complete. `value`: previous value of the word, for an
  /// atomic. Tickets that this end did not issue, or that were answered before, are not reported.
  std::function<void(int peer, std::uint64_t ticket, std::uint64_t value)> completed{};
  /// Applies a peer's atomic to this end's memory and returns the previous value of the word; the engine has checked
  /// range and alignment. Absent: the engine applies it with the processor's atomics.
  std::function<std::uint64_t(const AtomicOp& op)> apply_atomic{};
  /// Peers' atomics have changed this end's memory.
  std::function<void()> changed{};
};

/// Description of the way to a peer, for display.
struct Path {
  int peer = 0;
  std::string description;  ///< e.g. "tcp over eth0"
  /// The processors of this host copy all bytes in put() or poll(), without the kernel or a network card.
  bool in_memory = false;
};

/// One end. Only one thread at a time calls it, its owner's (net::Proxy), except for `event_fd`. That thread also
/// reports the events; another thread may store the bytes of puts.
class Engine {
 public:
  virtual ~Engine() = default;

  virtual std::string_view name() const = 0;
  /// Protocol version. The ends of a network must all have the same. Empty: that of this build.
  virtual std::string_view version() const { return {}; }

  /// Memory that peers put into: the owner's, or memory that this engine allocated, aligned to 64 bytes, and frees with
  /// itself. The engine chooses the kind that it works best with: some transports store directly into a peer's memory
  /// only if they allocated it.
  virtual std::span<std::byte> memory() const = 0;

  /// Address that peers need for `connect`, including access to `memory`.
  virtual Result<Blob> address() const = 0;

  /// Begins to connect to all peers; `addresses[self]` is not read. Blobs arrive over the network: truncated or
  /// corrupted ones are refused before any part of them is used (the bootstrap keeps out forged ones:
  /// docs/transport.md). Later failures are reported as `lost`.
  /// @errors kTransport: a blob is malformed, names another engine or a memory of another size than this end's; kSystem
  virtual Status connect(std::span<const Blob> addresses, EngineEvents events) = 0;

  /// Copies memory[local_offset, + num_bytes) to the same kind of memory of `peer` at `remote_offset`. The source must
  /// not change until the peer has answered a later notify or `close` has returned. The caller ensures that both ranges
  /// lie inside the memory. Never blocks.
  virtual void put(int peer, int channel, std::size_t local_offset, std::size_t remote_offset,
                   std::size_t num_bytes) = 0;

  /// Sends `peer` a number, delivered after all earlier puts on this channel. Never blocks.
  virtual void notify(int peer, int channel, std::uint64_t value) = 0;

  /// put, then notify: one message if the engine sends both as messages, or if few bytes of host memory would take a
  /// network latency more as a write, provided that no earlier put on this channel is under way.
  virtual void put_notify(int peer, int channel, std::size_t local_offset, std::size_t remote_offset,
                          std::size_t num_bytes, std::uint64_t value) {
    put(peer, channel, local_offset, remote_offset, num_bytes);
    notify(peer, channel, value);
  }

  /// Operations of the one-sided layer. None of them blocks; the caller ensures that remote ranges lie inside the
  /// memory.
  ///
  /// Like put, but from any memory of this process of the same kind. The source must not change until a later flush or
  /// release has completed.
  virtual void put_from(int peer, int channel, std::span<const std::byte> source, std::size_t remote_offset) = 0;
  /// Copies the peer's memory at `remote_offset` to `into`, any memory of this process, which is written until the
  /// ticket completes. The read is ordered only after flushes that completed before this call.
  virtual void get(int peer, std::span<std::byte> into, std::size_t remote_offset, std::uint64_t ticket) = 0;
  /// Applies `op` to the peer's memory after all earlier puts on this channel have arrived. Reported as completed
  /// unless the ticket is kNoTicket.
  virtual void atomic(int peer, int channel, const AtomicOp& op, std::uint64_t ticket) = 0;
  /// put_from, then `op` like atomic() without a ticket: one message if the engine sends both as messages.
  virtual void put_atomic(int peer, int channel, std::span<const std::byte> source, std::size_t remote_offset,
                          const AtomicOp& op) {
    put_from(peer, channel, source, remote_offset);
    atomic(peer, channel, op, kNoTicket);
  }
  /// Puts into the peer's GPU memory after this call become visible there, also to kernels that run, only after all
  /// those before it. So a put of a few bytes can tell a kernel that earlier ones have arrived, while the peer's
  /// processor takes no part. Never blocks. For engines with GPU memory.
  virtual void order_puts(int /*peer*/) {}
  /// True if kernels of the peer see puts into GPU memory without a flush behind them.
  virtual bool shows_puts(int /*peer*/) const { return true; }
  /// Completes when all earlier puts and atomics to `peer`, on all channels, are in its memory.
  virtual void flush(int peer, std::uint64_t ticket) = 0;
  /// Completes when the sources of all earlier puts to `peer` may change, which may be before they have arrived: no
  /// message of its own, if the engine learns that from its network.
  virtual void release(int peer, std::uint64_t ticket) { flush(peer, ticket); }
  /// True if a release would be complete at once.
  virtual bool is_released(int /*peer*/) const { return false; }
  /// Cancels the report of the ticket. The destination of its get is not written afterwards, except by a network card
  /// that writes by itself.
  virtual void forget(std::uint64_t ticket) = 0;

  /// Makes progress and reports events. Never blocks. True if anything happened: poll again soon.
  virtual bool poll() = 0;

  /// True if every operation given for `peer` has left this end, or if the peer is lost.
  virtual bool flushed(int peer) const = 0;

  /// Descriptor that becomes readable when poll() has work; -1 if there is none (then poll regularly).
  virtual int event_fd() const = 0;
  /// Prepares for a sleep on event_fd(). False: an event is already pending, poll first.
  virtual bool arm() = 0;

  virtual std::vector<Path> paths() const = 0;
  /// EngineOptions::cards as far as cards were given them.
  virtual CardSettings card_settings() const { return {}; }

  /// Shortens the deadline of `close` to this time if it is longer.
  virtual void limit_close_time(std::int64_t timeout_ns) = 0;

  /// Finishes sending, within the deadline, then disconnects from all peers. No peer accesses `memory` afterwards.
  virtual void close() = 0;
};

/// One entry of the registry.
struct EngineFactory {
  std::string_view name;
  std::string_view description;
  /// Ok if the engine can run on this machine, else the reason and the remedy. No side effects.
  Status (*probe)();
  Result<std::unique_ptr<Engine>> (*create)(const EngineOptions& options);
  /// Environment variable with which users of this network's library name its devices. Empty: the network has no
  /// devices.
  const char* devices_variable = "";
  /// Display name of the library that the engine loads. Loads no more than the probe does. Null: there is none.
  std::string (*library)() = nullptr;
  /// Reports whether the engine puts from and into GPU memory here. Opens the same resources as an engine. Null: it
  /// never does.
  GpuDirectFact (*gpu_memory)() = nullptr;
};

/// The engines of this build, best first. Defined in src/registry.cpp.
std::span<const EngineFactory> engine_factories();

}  // namespace ferry::net

#endif  // FERRY_NET_ENGINE_HPP
