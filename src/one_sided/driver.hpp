#ifndef FERRY_ONE_SIDED_DRIVER_HPP
#define FERRY_ONE_SIDED_DRIVER_HPP

/// Passes the one-sided operations of one rank to a network engine, and drives the engine so that operations of other
/// ranks on this rank's memory make progress too. A thread drives it while no caller does; a rank that issues or waits
/// drives the engine itself, under the same lock, so that a call costs no thread switch.
///
/// Operations to one peer are issued in order, but the engine orders only an atomic after the earlier puts on its
/// channel. `fence` starts a flush; nothing more is issued to the peer until it has completed. `quiet` is a flush of
/// every peer used since its last flush, and waits for the answers of all gets.
///
/// Requests are submitted by threads of the rank through the calls, or by kernels through a ring (RequestSource). The
/// thread that drives issues a source's requests, those to one peer in the source's order.
///
///   word            writer        readers  order                   publishes
///   the engine      lock holder   same     the lock                everything but the two below
///   asleep          the thread    callers  seq_cst                 nothing; a caller that left work behind wakes it
///   armed           the thread    callers  seq_cst                 nothing; a caller that takes events from the engine
///                                                                  wakes the thread in the engine's place
///   num_drivers     callers       thread   relaxed                 nothing; the thread leaves polling to them
///   num_sources     lock holder   thread   relaxed                 nothing; the thread then looks under the lock
///   stop            destructor    thread   relaxed                 nothing; set under the lock, then wakes the thread

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "net/engine.hpp"
#include "net/wake_fd.hpp"

namespace ferry::one_sided {

/// Receives the end of an operation from the thread that drives the engine, under its lock: must be short, must not
/// wait, and must not call the driver.
class Completion {
 public:
  virtual ~Completion() = default;
  /// `value`: previous value of the word, for an atomic; otherwise 0.
  virtual void done(std::uint64_t value) = 0;
  /// The peer was lost before the operation was complete.
  virtual void lost(int peer) = 0;
};

/// One operation on the memory of `peer` (a rank). Offsets refer to the engine's memory: see Fabric::engine_offset.
struct NetworkRequest {
  enum class Kind : std::uint32_t {
    kPut = 0,
    kGet = 1,
    kAtomic = 2,     ///< on `offset`: see net::AtomicOp; without `completion` nothing is fetched
    kPutSignal = 3,  ///< the put, then the atomic of `op` on `op.offset`, seen after the bytes
    kFence = 4,      ///< orders earlier requests to `peer` before later ones
    kFlush = 5,      ///< completes when all earlier requests to `peer` have completed
    kRelease = 6,    ///< completes when the sources of all earlier puts to `peer` may change
    /// Orders earlier puts into GPU memory of `peer` before later ones.
    kOrder = 7,
    /// Kernels of `peer` see earlier puts into its GPU memory: a flush, if they would not do so by themselves.
    kShow = 8,
  };
  Kind kind = Kind::kPut;
  int peer = 0;
  std::size_t offset = 0;
  std::byte* local = nullptr;  ///< put: the source, which is only read; get: the destination
  std::size_t num_bytes = 0;
  /// kPut, kPutSignal: the driver copies the source, which may be reused once the request is issued.
  bool copy_source = false;
  net::AtomicOp op{};
  /// kAtomic: flush_all() waits for it. False for words with which ranks only report their progress.
  bool counts = true;
  Completion* completion = nullptr;  ///< kGet, kAtomic, kFlush, kRelease; may be null. Outlives the request
};

/// True if requests to a peer can be issued now.
using CanIssue = std::function<bool(int peer)>;

/// Source of requests other than the driver's calls: a ring written by kernels. Called under the engine's lock.
class RequestSource {
 public:
  virtual ~RequestSource() = default;
  /// Next request to a peer for which `can_issue` is true, in order for each peer. Null: there is none now.
  virtual const NetworkRequest* front(const CanIssue& can_issue) = 0;
  /// The request returned by the last `front` was issued.
  virtual void taken() = 0;
  /// True if the driver's thread must not sleep, because the next request will not wake it.
  virtual bool needs_polling() const = 0;
};

class Driver {
 public:
  /// Channels of the engine that it drives.
  static constexpr int kNumChannels = 2;

  /// `changed`: called, without the lock, after peers have changed this rank's memory or an operation has completed.
  Driver(std::unique_ptr<net::Engine> engine, const net::EngineOptions& options, std::function<void()> changed);
  /// Closes the engine, which takes at most the engine's deadline.
  ~Driver();
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  /// Sets the function that applies atomics to memory that the processor cannot change atomically. Call before start();
  /// see EngineEvents.
  void apply_atomics_by(std::function<std::uint64_t(const net::AtomicOp&)> apply) { apply_ = std::move(apply); }
  /// Connects and starts the thread. Call once.
  Status start(std::span<const net::Blob> addresses);

  /// Any thread. Issues the request; returns false if that is not possible now, because of a fence to the peer or too
  /// many operations under way: then call progress() until it is. For a lost peer, `completion` receives the loss.
  bool try_issue(const NetworkRequest& request);
  /// Number of callbacks that the completion of such a request receives: one per part of a long get, otherwise one.
  static std::uint64_t num_parts(const NetworkRequest& request);
  /// `completion` receives no callback afterwards, and the destinations of its gets are not written (except by a
  /// network card that writes by itself).
  void forget(const Completion* completion);
  /// Begins a flush of every peer that has operations of calls under way, not for those of sources; `completion`
  /// receives one callback per flush. Returns the number of flushes. `only`: the only such peer; -1: all of them.
  int flush_all(Completion* completion, int only);
  /// A rank with a get of `get_nbi` (without a `completion`) under way, `only` as above; -1: there is none.
  int find_pending_get(int only) const;
  /// A rank that has not answered `completion`, or else a get; -1: there is none.
  int find_late(const Completion* completion, int only) const;
  /// Takes an unreported loss of `peer`, or with -1 of any rank, that was lost with operations of calls under way.
  /// Returns the rank, whose loss the caller must report; -1: there is none.
  int take_failure(int peer);

  /// Drives the network. True if anything happened.
  bool progress();
  /// Until end_wait() or hand_over() this thread calls progress() continuously, and the driver's thread leaves the
  /// engine to it.
  void begin_wait();
  void end_wait();
  /// This thread is about to sleep until `changed` wakes it: the driver's thread takes over.
  void hand_over();

  /// The source must outlive the driver, or its detach(). Any thread.
  void attach(RequestSource* source);
  void detach(RequestSource* source);
  /// Wakes the driver for new requests of a source that does not need polling.
  void wake();

  /// Ok unless the network has reported the peer as lost.
  Status peer_status(int peer) const;
  std::vector<net::Path> paths();
  /// Limits the time of the destructor.
  void limit_close_time(std::int64_t timeout_ns);

 private:
  /// Sources of one or more puts, kept until that flush has completed.
  struct Copies {
    std::uint64_t flush = 0;
    std::vector<std::byte> bytes;  // never grows beyond its capacity: engines read it
  };
  /// Operations under way to a peer. Flushes are numbered; everything issued before a flush is complete when the flush
  /// is.
  struct Peer {
    std::uint64_t num_issued = 0;      // puts and atomics since the last flush began
    std::uint64_t num_since_full = 0;  // puts and atomics since the last flush completed
    std::uint64_t flush_begun = 0;
    std::uint64_t flush_done = 0;
    std::uint64_t fence = 0;             // nothing is issued before this flush has completed
    std::uint64_t calls_end = 0;         // this flush completes everything that calls have issued
    std::uint64_t num_pending_gets = 0;  // gets of calls
    bool has_failed = false;             // lost with operations of calls under way; no quiet has reported it yet
    std::deque<Copies> copies;
    std::size_t copied_bytes = 0;
    std::size_t copied_since_flush = 0;
  };
  /// An operation that the engine will report as completed.
  struct Ticket {
    int peer = 0;
    Completion* completion = nullptr;
    std::uint64_t flush = 0;   // for a flush: its number
    bool pending_get = false;  // a get that find_pending_get() finds
  };
  /// Loss of a peer. `why` is written before `gone` is set, and not afterwards.
  struct Loss {
    std::atomic<bool> gone{false};
    Status why;
  };

  Peer& at(int peer) { return peers_[static_cast<std::size_t>(peer)]; }
  bool can_issue(int peer) const;
  enum class Asker { kCall, kSource };
  void issue(const NetworkRequest& request, Asker asker);
  std::span<const std::byte> copy(Peer& to, std::span<const std::byte> source);
  std::uint64_t add_ticket(const Ticket& ticket);
  void begin_flush(int peer, Completion* completion);
  void on_completed(int peer, std::uint64_t ticket, std::uint64_t value);
  void on_lost(int peer, const Status& why);
  bool serve_sources();
  bool must_poll_sources();
  bool has_unsent();
  /// Result of driving the engine.
  struct Moved {
    bool any = false;
    bool last = false;  // in the last round: there may be more to do
  };
  Moved turn(int max_rounds);
  void settle();
  void run();
  void sleep_until_woken();
  void sleep(int engine_fd, std::int64_t timeout_ns);

  std::unique_ptr<net::Engine> engine_;
  const int num_peers_;
  const std::function<void()> changed_;
  std::function<std::uint64_t(const net::AtomicOp&)> apply_;
  std::vector<Loss> losses_;

  mutable std::mutex mutex_;  // guards the engine and the next eight
  std::vector<Peer> peers_;
  std::unordered_map<std::uint64_t, Ticket> tickets_;
  std::uint64_t last_ticket_ = net::kNoTicket;
  std::vector<RequestSource*> sources_;
  std::uint64_t num_changes_ = 0;  // of memory by peers, and completions
  std::uint64_t num_told_ = 0;
  std::int64_t close_timeout_ns_;
  std::int64_t nap_ns_ = 0;

  std::atomic<std::size_t> num_sources_{0};
  std::atomic<bool> stop_{false};
  std::atomic<int> num_drivers_{0};
  std::atomic<std::int64_t> last_drive_ns_{0};
  std::atomic<bool> asleep_{false};
  std::atomic<bool> armed_{false};  // the thread sleeps until the engine wakes it
  net::WakeFd wake_;
  std::thread thread_;
};

}  // namespace ferry::one_sided

#endif  // FERRY_ONE_SIDED_DRIVER_HPP
