#ifndef FERRY_NET_PROXY_HPP
#define FERRY_NET_PROXY_HPP

/// The thread that drives an engine for one rank. The rank hands it puts and notifies and reads what arrived; neither
/// waits for the other to do so. Sleeps while nothing happens.
///
/// A rank that has no core to spare for a second thread takes the engine into its own hands while it waits for the
/// network, and gives it back to the thread afterwards: a chunk then costs no switch from one to the other. It takes
/// over between two turns of the thread, which never block.
///
///   word                 writer   readers   order                            publishes
///   received[p][c]       driver   rank      store release / load acquire     the bytes put before that notify
///   lost[p]              driver   rank      store release / load acquire     why_lost(p)
///   the queue of orders  rank     proxy     a mutex                          what lies in memory at the offsets named
///   who drives           rank     proxy     the same mutex                   the engine

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "net/engine.hpp"

namespace ferry::net {

/// Bytes and messages given to the network for one peer since the beginning.
struct PeerTraffic {
  std::uint64_t put_bytes = 0;
  std::uint64_t num_puts = 0;
  std::uint64_t num_notifies = 0;
};

class Proxy {
 public:
  /// `ring` is called by the proxy's thread, after it changed any word above: it wakes the rank. Must not block. A rank
  /// that drives the engine itself is not rung.
  /// `waits_awake`: the thread looks for what comes next for a moment before it sleeps. For hosts with a core for each
  /// thread.
  Proxy(std::unique_ptr<Engine> engine, const EngineOptions& options, std::function<void()> ring,
        bool waits_awake = true);
  /// Closes the engine: at most its deadline.
  ~Proxy();
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  /// Connect and start the thread. Once.
  Status start(std::span<const Blob> addresses);

  /// As the engine's, from any one thread at a time.
  void put(int peer, int channel, std::size_t local_offset, std::size_t remote_offset, std::size_t num_bytes);
  void notify(int peer, int channel, std::uint64_t value);

  /// Highest value that `peer` has sent on `channel`, 0 before the first.
  std::uint64_t received(int peer, int channel) const;
  /// From here to give_back() the calling thread drives the engine: put() and notify() reach it at once, and nothing
  /// else moves but in drive(). The thread that puts and notifies; not twice.
  void take_over();
  void give_back();
  /// What can be moved now. True if anything was. False, and nothing happens, where this thread does not drive.
  bool drive();
  /// Sleeps until drive() has something to do, for at most so long. False at once where this thread does not drive.
  bool sleep(std::int64_t timeout_ns);

  /// From now on the destructor takes no longer than this.
  void hurry(std::int64_t timeout_ns);
  /// Ok while the peer is there as far as the network knows.
  Status peer_status(int peer) const;

  PeerTraffic traffic(int peer) const;
  /// Asks the engine; blocks until answered. From the thread that puts and notifies.
  std::vector<Route> routes();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ferry::net

#endif  // FERRY_NET_PROXY_HPP
