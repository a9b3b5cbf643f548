#ifndef FERRY_NET_ENGINE_HPP
#define FERRY_NET_ENGINE_HPP

/// The network as this library uses it: bytes put into a peer's memory and numbers that notify the peer of them, which
/// is all that dispatch and combine need; and for the one-sided layer gets, atomics on words of a peer's memory, and
/// flushes. Deliberately small, the common denominator of every fabric. docs/transport.md says how to add an engine.
///
/// Words: a *peer* is another end of the same network, by index; a *channel* numbers one of several independent
/// sequences of operations to a peer.
///
/// Ordering: `notify(peer, channel, value)` is seen by the peer only after the bytes of every earlier `put` to that
/// peer on that channel, and so is what `atomic(peer, channel, …)` does. Nothing else is ordered: not puts or atomics
/// among themselves, not gets, not one channel with another, and not two notifies of one channel, so only the highest
/// value that a peer has seen counts. A `flush` completes when everything before it has, on all channels.
///
/// Atomics are applied by the processor of the rank whose memory it is, in its poll(), whatever a network card could do
/// by itself: so they are atomic with those of ranks that share that memory, which no card promises.

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

/// What one end publishes so that others can reach it. Carried by the (authenticated) bootstrap.
using Blob = std::vector<std::byte>;

/// The largest blob that an engine may publish: the bootstrap carries one per rank in a single message of at most 1
/// MiB, together with other data.
inline constexpr std::size_t kMaxBlobBytes = 64 << 10;

/// Offsets from here on are in EngineOptions::gpu_memory.
inline constexpr std::size_t kGpuOffset = std::size_t{1} << 48;

struct EngineOptions {
  int self = 0;          ///< this end's index among the peers
  int num_peers = 1;     ///< ends of the network, including this one
  int num_channels = 1;  ///< to each peer
  /// Memory that peers put into, and that this end puts from. Outlives the engine. Everything is addressed by offset.
  /// Empty: the engine allocates `memory_bytes` itself, see Engine::memory().
  std::span<std::byte> memory{};
  std::size_t memory_bytes = 0;
  /// GPU memory that peers' network cards write into and this end's card reads, for `put` from and to offsets from
  /// kGpuOffset on. As much on all ends. Not for engines whose factory has no gpu_memory().
  std::span<std::byte> gpu_memory{};
  std::int64_t timeout_ns = 0;  ///< deadline of `close`
  /// What errors call the peers, by index: their ranks in the group. Empty: their indices.
  std::vector<int> ranks{};

  /// By peer: it runs on this host and shares its memory and its loopback interface. Such peers are never reached
  /// through a network. Empty: none is known to.
  std::vector<bool> on_this_host{};
  /// Network devices that may reach peers on other hosts, separated by commas, as the engine names them ("eth0",
  /// "mlx5_0:1"). Empty: the engine chooses.
  std::string net_devices{};
  /// The engine may start a thread that takes large puts of peers where processors copy their bytes, so that the
  /// owner's only sends. For hosts with a core to spare for it.
  bool may_start_receiver = false;

  int rank_of(int peer) const { return ranks.empty() ? peer : ranks[static_cast<std::size_t>(peer)]; }
};

/// Of get, atomic and flush: no answer is wanted.
inline constexpr std::uint64_t kNoTicket = 0;

/// What an engine reports to its owner, from inside poll().
struct EngineEvents {
  /// `peer` sent `value` on `channel`. Values may arrive out of order. Channel and peer are always in range, whatever
  /// was sent.
  std::function<void(int peer, int channel, std::uint64_t value)> notified;
  /// The connection to `peer` is lost; reported once per peer. Later operations to it are dropped silently. kPeerLost
  /// where it closed or died, kTransport where the network failed.
  std::function<void(int peer, const Status& why)> lost;
  /// The get, atomic or flush of this ticket is complete. `value`: of an atomic, what the word was before. Tickets that
  /// this end did not give, or that were answered before, do not get here.
  std::function<void(int peer, std::uint64_t ticket, std::uint64_t value)> completed{};
  /// Applies an atomic of a peer to this end's memory, whose range and alignment have been checked, and returns what
  /// the word was before. Absent: the engine does it, with the processor's atomics.
  std::function<std::uint64_t(const AtomicOp& op)> apply_atomic{};
  /// Peers have changed this end's memory by atomics.
  std::function<void()> changed{};
};

/// How an engine reaches a peer, for display.
struct Path {
  int peer = 0;
  std::string description;  ///< e.g. "tcp over eth0"
  /// The processors of this host copy all bytes, in put() or poll(); no kernel or network card does part of the work.
  bool in_memory = false;
};

/// One end. Everything except `event_fd` is called by one thread at a time, that of its owner (net::Proxy). Events are
/// reported by that thread too; bytes of puts may come by another.
class Engine {
 public:
  virtual ~Engine() = default;

  virtual std::string_view name() const = 0;
  /// Of what makes the ends of a network understand each other: all of them must have the same. Empty: this build's.
  virtual std::string_view version() const { return {}; }

  /// What peers put into: the owner's memory, or memory that this engine allocated, aligned to 64 bytes, of the kind it
  /// works with best (some transports store directly into a peer's memory only if they allocated it) and freed with the
  /// engine.
  virtual std::span<std::byte> memory() const = 0;

  /// What peers need for `connect`, including how to put into `memory`.
  virtual Result<Blob> address() const = 0;

  /// Begin to connect to all peers; `addresses[self]` is not read. Blobs come from the network: truncated or corrupted
  /// ones are refused before any of it is used (keeping out forged ones is the bootstrap's task: docs/transport.md).
  /// Later failures are reported as `lost`.
  /// @errors kTransport: a blob is malformed, names another engine or a memory of another size than this end's; kSystem
  virtual Status connect(std::span<const Blob> addresses, EngineEvents events) = 0;

  /// Copy memory[local_offset, + num_bytes) to the same kind of memory of `peer` at `remote_offset`. The source must
  /// not change until the peer has answered a later notify, or `close` returned. The caller ensures that both ranges
  /// are inside the memory. Never blocks.
  virtual void put(int peer, int channel, std::size_t local_offset, std::size_t remote_offset,
                   std::size_t num_bytes) = 0;

  /// Send `peer` a number, delivered after all earlier puts on this channel have arrived. Never blocks.
  virtual void notify(int peer, int channel, std::uint64_t value) = 0;

  /// For the one-sided layer. None of them blocks; the caller ensures that remote ranges are inside the memory.
  ///
  /// As put, but from any memory of this process. The source must not change until a later flush has completed.
  virtual void put_from(int peer, int channel, std::span<const std::byte> source, std::size_t remote_offset) = 0;
  /// Copy the peer's memory at `remote_offset` to any memory of this process, `into`, which is written until the ticket
  /// completes. What it reads is ordered with nothing but flushes before it that have completed.
  virtual void get(int peer, std::span<std::byte> into, std::size_t remote_offset, std::uint64_t ticket) = 0;
  /// Apply `op` to the peer's memory after all earlier puts on this channel have arrived. Reported as completed unless
  /// the ticket is kNoTicket.
  virtual void atomic(int peer, int channel, const AtomicOp& op, std::uint64_t ticket) = 0;
  /// put_from, and then `op` as by atomic without a ticket: one message where the engine sends both by messages.
  virtual void put_atomic(int peer, int channel, std::span<const std::byte> source, std::size_t remote_offset,
                          const AtomicOp& op) {
    put_from(peer, channel, source, remote_offset);
    atomic(peer, channel, op, kNoTicket);
  }
  /// Completed when all earlier puts and atomics on all channels to `peer` are in its memory.
  virtual void flush(int peer, std::uint64_t ticket) = 0;
  /// The ticket will not be reported, and the destination of its get not be written any more, except by a network card
  /// that does so by itself.
  virtual void forget(std::uint64_t ticket) = 0;

  /// Make progress and report events. Never blocks. True if anything happened: poll again soon.
  virtual bool poll() = 0;

  /// Whether everything that was given for `peer` has left this end. (Also true once the peer is lost.)
  virtual bool flushed(int peer) const = 0;

  /// A descriptor that becomes readable when poll() has something to do, -1 if there is none (then poll regularly).
  virtual int event_fd() const = 0;
  /// Make ready to sleep on event_fd(). False: something has happened already, poll first.
  virtual bool arm() = 0;

  virtual std::vector<Path> paths() const = 0;

  /// From now on the deadline of `close` is no longer than this.
  virtual void limit_close_time(std::int64_t timeout_ns) = 0;

  /// Finish sending, for at most the deadline, then disconnect from all peers. Afterwards no peer accesses `memory`.
  virtual void close() = 0;
};

/// One entry of the registry.
struct EngineFactory {
  std::string_view name;
  std::string_view description;
  /// Ok if the engine can run on this machine, else why not and what to do. No side effects.
  Status (*probe)();
  Result<std::unique_ptr<Engine>> (*create)(const EngineOptions& options);
  /// The variable by which users of this network's library name its devices. Empty: the network has no devices.
  const char* devices_variable = "";
  /// The library that the engine loads, for people; what the probe loads, and no more. Null: there is none.
  std::string (*library)() = nullptr;
  /// Whether it puts from and into GPU memory here. Opens what an engine opens. Null: it never does.
  GpuDirectFact (*gpu_memory)() = nullptr;
};

/// The engines of this build, best first. Defined in src/registry.cpp.
std::span<const EngineFactory> engine_factories();

}  // namespace ferry::net

#endif  // FERRY_NET_ENGINE_HPP
