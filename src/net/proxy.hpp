#ifndef FERRY_NET_PROXY_HPP
#define FERRY_NET_PROXY_HPP

/// Thread that drives an engine for one rank. The rank hands it puts and notifies through a queue and chunks through
/// rings, and reads arrivals from shared words; neither thread waits for the other. The proxy's thread sleeps while
/// there is no work.
///
/// A rank without a spare core for a second thread acquires the engine while it waits for the network and releases it
/// afterwards, so that a chunk costs no thread switch. It acquires the engine between two turns of the proxy's thread,
/// which never block.
///
///   word                 writer   readers   order                            publishes
///   received[p][c]       driver   rank      store release / load acquire     the bytes put before that notify
///   losses[p].gone       driver   rank      store release / load acquire     losses[p].why
///   RingWords            see there
///   asleep               proxy    rank      seq_cst                          nothing; see RingWords
///   the queue of orders  rank     proxy     a mutex                          the memory at the offsets it names
///   driver of the engine rank     proxy     the same mutex                   the engine
///   asked                rank     proxy     store release / load acquire     nothing; the proxy takes the mutex

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "net/engine.hpp"
#include "net/ring_words.hpp"
#include "net/wake_fd.hpp"

namespace ferry::net {

/// Bytes and messages handed to the network for one peer so far.
struct PeerTraffic {
  std::uint64_t put_bytes = 0;
  std::uint64_t num_puts = 0;
  std::uint64_t num_notifies = 0;
};

class Proxy {
 public:
  /// `wake_rank`: called by the proxy's thread after it changed any word that the rank reads. Must not block. Not
  /// called while the rank drives the engine itself.
  /// `spins`: the thread polls briefly before it sleeps. For hosts with a core for each thread.
  Proxy(std::unique_ptr<Engine> engine, const EngineOptions& options, std::function<void()> wake_rank,
        bool spins = true);
  /// Closes the engine, which takes at most the engine's deadline.
  ~Proxy();
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  /// Attaches the rings shared with `peer`. Call before start(); the words outlive the proxy.
  void attach_ring(int peer, const RingPort& port);
  /// Attaches the rings between kernels, which use channels of their own.
  void attach_kernel_ring(int peer, const RingPort& port);
  /// Binds the thread to these processors, if there are any. Call before start().
  void run_on(std::vector<int> cpus) { cpus_ = std::move(cpus); }
  /// Connects and starts the thread. Call once.
  Status start(std::span<const Blob> addresses);

  /// Like the engine's functions, from one thread at a time.
  void put(int peer, int channel, std::size_t local_offset, std::size_t remote_offset, std::size_t num_bytes);
  void notify(int peer, int channel, std::uint64_t value);
  void put_notify(int peer, int channel, std::size_t local_offset, std::size_t remote_offset, std::size_t num_bytes,
                  std::uint64_t value);
  /// Sends the chunks filled before the call, then notifies `peer` that no more follow.
  void close_ring(int peer);

  /// This rank's thread has stored `filled` or `used` of its ring with `peer`.
  void post_ring(int peer) {
    if (driving_) {
      serve_ring(peer, kNoLimit);
    } else if (asleep_.load(std::memory_order_seq_cst)) {
      wake();
    }
  }
  /// While true, the thread does not sleep: kernels store `filled` and `used` and cannot wake it. Any thread.
  void keep_polling(bool polling);

  /// Highest value that `peer` has sent on `channel`, 0 before the first. Not for the channels of a ring.
  std::uint64_t received(int peer, int channel) const {
    return received_[static_cast<std::size_t>(peer * num_channels_ + channel)].load(std::memory_order_acquire);
  }

  /// The calling thread drives the engine until release(): put(), notify() and post_ring() act at once, and all other
  /// progress happens only in progress(). For the thread that puts and notifies; not recursive.
  void acquire();
  void release();
  /// Polls the engine. True if anything happened. False, without effect, if this thread does not drive the engine.
  bool progress();
  /// Sleeps until progress() has work, at most `timeout_ns`. False at once if this thread does not drive the engine.
  bool sleep(std::int64_t timeout_ns);

  /// Limits the time of the destructor.
  void limit_close_time(std::int64_t timeout_ns);
  /// Ok unless the network has reported the peer as lost.
  Status peer_status(int peer) const;

  /// Chunks of a ring count once they have been handed to the engine; paths() waits for those filled before it.
  PeerTraffic traffic(int peer) const;
  /// Queries the engine; blocks until answered. For the thread that puts and notifies.
  std::vector<Path> paths();

 private:
  static constexpr std::size_t kNoLimit = ~std::size_t{0};

  struct Order {
    enum class Kind { kPut, kNotify, kPutNotify, kCloseRing, kPaths };
    Kind kind = Kind::kPut;
    int peer = 0;
    int channel = 0;
    std::size_t local_offset = 0;
    std::size_t remote_offset = 0;
    std::size_t num_bytes = 0;
    std::uint64_t value = 0;
    std::promise<std::vector<Path>>* paths = nullptr;
  };
  /// A ring and the progress with which the driver has served it.
  struct Ring {
    RingPort port;
    std::uint64_t num_sent = 0;
    std::uint64_t num_credited = 0;
  };
  /// Loss of a peer. `why` is written before `gone` is set, and not afterwards.
  struct Loss {
    std::atomic<bool> gone{false};
    Status why;
  };
  /// Atomic, because any thread may read them.
  struct TrafficCounters {
    std::atomic<std::uint64_t> put_bytes{0};
    std::atomic<std::uint64_t> num_puts{0};
    std::atomic<std::uint64_t> num_notifies{0};
  };
  struct Sleep {
    int engine_fd = -1;  // -1: nothing wakes the sleeper
    std::int64_t timeout_ns = 0;
  };

  bool is_peer(int peer) const { return peer >= 0 && peer < num_peers_; }
  Loss& loss(int peer) { return losses_[static_cast<std::size_t>(peer)]; }
  Ring& ring(int peer) { return rings_[static_cast<std::size_t>(peer)]; }
  Ring& kernel_ring(int peer) { return rings_[static_cast<std::size_t>(num_peers_ + peer)]; }
  TrafficCounters& counters(int peer) { return traffic_[static_cast<std::size_t>(peer)]; }

  void on_notified(int peer, int channel, std::uint64_t value);
  static bool on_ring_notified(Ring& ring, int channel, std::uint64_t value);
  void on_lost(int peer, const Status& why);

  void push(const Order& order);
  void wake();
  void run();
  bool begin_turn(std::vector<Order>* orders);
  bool execute(std::vector<Order>* orders);
  void execute(const Order& order);
  bool serve_ring(int peer, std::size_t max_bytes);
  void attach(int peer, Ring* ring, const RingPort& port);
  bool serve(int peer, Ring& ring, std::size_t max_bytes);
  static std::optional<std::size_t> next_filled(const Ring& ring, std::memory_order order);
  static bool is_next_used(const Ring& ring, std::uint64_t chunk_idx, std::memory_order order);
  bool serve_rings(std::size_t max_bytes);
  bool has_ring_work() const;
  std::optional<Sleep> plan_sleep(std::int64_t* nap_ns, std::int64_t longest_ns);
  void sleep_until_woken(std::int64_t* nap_ns);

  std::unique_ptr<Engine> engine_;
  const int num_peers_;
  const int num_channels_;
  const std::function<void()> wake_rank_;
  const std::chrono::microseconds spin_time_;
  std::int64_t close_timeout_ns_;  // guarded by mutex_
  std::vector<std::atomic<std::uint64_t>> received_;
  std::vector<Loss> losses_;
  std::vector<TrafficCounters> traffic_;
  std::vector<Ring> rings_;  // by peer, followed by the rings between kernels; words are null if there is no ring
  std::vector<std::pair<int, Ring*>> attached_;  // those that there are, with their peers

  std::vector<int> cpus_;  // empty: the thread runs where its starter may
  WakeFd wake_;
  std::atomic<bool> asleep_{false};  // the thread is in poll(2), or about to be, and wants a signal
  std::atomic<bool> polling_{false};
  std::atomic<bool> asked_{false};  // set with any of the next three members; cleared by the proxy's thread
  std::mutex mutex_;
  std::vector<Order> orders_;  // guarded by mutex_, as are the next three
  bool stop_ = false;
  bool taken_ = false;    // the rank's thread drives, or waits for the proxy's thread to end its turn
  bool turning_ = false;  // the proxy's thread drives; only that one writes it
  std::condition_variable turn_ended_;
  std::condition_variable released_;
  bool started_ = false;  // used by the rank's thread only, as are the next two
  bool driving_ = false;
  std::int64_t own_nap_ns_ = 0;
  bool changed_ = false;  // used by the driver: a word changed since the rank was last woken
  std::thread thread_;
};

}  // namespace ferry::net

#endif  // FERRY_NET_PROXY_HPP
