#ifndef FERRY_NET_ENGINE_HPP
#define FERRY_NET_ENGINE_HPP

/// The network as this library uses it: bytes put into a peer's memory, and numbers that tell the peer about them.
/// Small on purpose, the common denominator of every fabric: no remote atomics, no ordering but the one below.
/// docs/transport.md says how to add an engine.
///
/// Words: a *peer* is another end of the same network, by index; a *channel* numbers one of several independent
/// sequences of operations towards a peer.
///
/// Ordering: `notify(peer, channel, value)` is seen by the peer only after the bytes of every earlier `put` to that
/// peer on that channel. Nothing else is ordered: not puts among themselves, not one channel with another, and not two
/// notifies of one channel, so a value that a peer has seen never goes back: the highest counts.

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

namespace ferry::net {

/// What one end publishes so that others can reach it. Carried by the (authenticated) bootstrap.
using Blob = std::vector<std::byte>;

/// The largest blob that an engine may publish: the bootstrap carries one per rank in a single message of at most 1
/// MiB, beside other things.
inline constexpr std::size_t kMaxBlobBytes = 64 << 10;

struct EngineOptions {
  int self = 0;          ///< this end's index among the peers
  int num_peers = 1;     ///< ends of the network, this one included
  int num_channels = 1;  ///< towards each peer
  /// Memory that peers put into, and out of which this end puts. Outlives the engine. Everything is addressed by
  /// offset. Empty: the engine allocates `memory_bytes` itself, see Engine::memory().
  std::span<std::byte> memory{};
  std::size_t memory_bytes = 0;
  std::int64_t timeout_ns = 0;  ///< deadline of `close`
  /// What errors call the peers, by index: their ranks in the group. Empty: their indices.
  std::vector<int> ranks{};

  int rank_of(int peer) const { return ranks.empty() ? peer : ranks[static_cast<std::size_t>(peer)]; }
};

/// What an engine tells its owner, from inside poll().
struct EngineEvents {
  /// `peer` sent `value` on `channel`. Values may arrive out of order. Channel and peer are in range whatever was sent.
  std::function<void(int peer, int channel, std::uint64_t value)> notified;
  /// The connection to `peer` is gone, told once a peer; later operations towards it are dropped silently. kPeerLost
  /// where it closed or died, kTransport where the network failed.
  std::function<void(int peer, const Status& why)> lost;
};

/// What an engine chose for the way to a peer, for people to read.
struct Path {
  int peer = 0;
  std::string description;  ///< e.g. "tcp over eth0"
  /// The processors of this host copy all bytes, in put() or poll(): no kernel and no card works beside them.
  bool in_memory = false;
};

/// One end. Everything but `event_fd` is called by one thread at a time, its owner's (net::Proxy).
class Engine {
 public:
  virtual ~Engine() = default;

  virtual std::string_view name() const = 0;

  /// What peers put into: the owner's, or what this engine allocated, aligned to 64 bytes and as good as it can have it
  /// (some transports store straight into a peer's memory only where they allocated it). Goes with the engine then.
  virtual std::span<std::byte> memory() const = 0;

  /// What peers need for `connect`, the way to put into `memory` included.
  virtual Result<Blob> address() const = 0;

  /// Begin to connect to all peers; `addresses[self]` is not read. Blobs come from the network: what
  /// was cut or garbled is refused before any of it is used (docs/transport.md: forged ones are the bootstrap's to keep
  /// out). What fails later comes as `lost`.
  /// @errors kTransport: a blob is malformed, names another engine or a memory of another size than this end's; kSystem
  virtual Status connect(std::span<const Blob> addresses, EngineEvents events) = 0;

  /// Copy memory[local_offset, + num_bytes) to the same kind of memory of `peer` at `remote_offset`. The source must
  /// not change until the peer has answered a later notify, or `close` returned. Both ranges lie inside memory (the
  /// caller's duty). Never blocks.
  virtual void put(int peer, int channel, std::size_t local_offset, std::size_t remote_offset,
                   std::size_t num_bytes) = 0;

  /// Tell `peer` a number, after all earlier puts on this channel have arrived. Never blocks.
  virtual void notify(int peer, int channel, std::uint64_t value) = 0;

  /// Move what can be moved now, and report events. Never blocks. True if anything happened: poll again soon.
  virtual bool poll() = 0;

  /// Has everything that was given for `peer` left this end? (True too once the peer is lost.)
  virtual bool flushed(int peer) const = 0;

  /// A descriptor that becomes readable when poll() has something to do, -1 if there is none (then poll regularly).
  virtual int event_fd() const = 0;
  /// Make ready to sleep on event_fd(). False: something has happened already, poll first.
  virtual bool arm() = 0;

  virtual std::vector<Path> paths() const = 0;

  /// From now on the deadline of `close` is no longer than this.
  virtual void limit_close_time(std::int64_t timeout_ns) = 0;

  /// Send what is still under way, for at most the deadline, then let go of all peers. Afterwards nobody else touches
  /// `memory`.
  virtual void close() = 0;
};

/// One entry of the registry.
struct EngineFactory {
  std::string_view name;
  std::string_view description;
  /// Can it run here? The Status says why not and what to do. No side effects.
  Status (*probe)();
  Result<std::unique_ptr<Engine>> (*create)(const EngineOptions& options);
};

/// The engines of this build, best first. Defined in src/registry.cpp.
std::span<const EngineFactory> engine_factories();

}  // namespace ferry::net

#endif  // FERRY_NET_ENGINE_HPP
