#ifndef FERRY_ONE_SIDED_DRIVER_HPP
#define FERRY_ONE_SIDED_DRIVER_HPP

/// Gives the one-sided operations of one rank to a network engine, and keeps the engine moving so that the operations
/// of others on this rank's memory move too. A thread does that while nobody else does; a rank that issues or waits
/// drives the engine itself, under the same lock, so that a call costs no switch of threads.
///
/// Operations to one peer are issued in order, but the engine orders only an atomic behind the puts before it on its
/// channel. `fence` starts a flush; until that has completed nothing more is issued to the peer. `quiet` is a flush of
/// every peer used since its last, and the answers of all gets.
///
/// Requests come from threads of the rank, by the calls, or from a RequestSource: a ring that kernels write. Its
/// requests are issued by whoever drives, those to one peer in its order.
///
///   word            writer        readers  order                   publishes
///   the engine      lock holder   same     the lock                everything but the two below
///   asleep          the thread    callers  seq_cst                 nothing; a caller that left work behind wakes it
///   armed           the thread    callers  seq_cst                 nothing; who takes events from an engine that is to
///                                                                  wake the thread wakes it instead
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

/// Told of the end of an operation, by whoever drives the engine and under its lock: must be short, must not wait, and
/// must not call the driver.
class Completion {
 public:
  virtual ~Completion() = default;
  /// `value`: of an atomic, what the word was before; otherwise 0.
  virtual void done(std::uint64_t value) = 0;
  /// The peer was lost before the operation was complete.
  virtual void lost(int peer) = 0;
};

/// One operation on the memory of `peer` (a rank). Offsets are those of the engine's memory: see Fabric::engine_offset.
struct Request {
  enum class Kind : std::uint32_t {
    kPut = 0,
    kGet = 1,
    kAtomic = 2,     ///< on `offset`: see net::AtomicOp; without `completion` nothing is fetched
    kPutSignal = 3,  ///< the put, then the atomic of `op` on `op.offset`, seen after the bytes
    kFence = 4,      ///< earlier requests to `peer` before later ones
    kFlush = 5,      ///< completes when all earlier requests to `peer` have
  };
  Kind kind = Kind::kPut;
  int peer = 0;
  std::size_t offset = 0;
  std::byte* local = nullptr;  ///< put: the source, which is only read; get: the destination
  std::size_t num_bytes = 0;
  /// kPut, kPutSignal: the driver copies the source first, so that it may be reused when the request was issued.
  bool copy_source = false;
  net::AtomicOp op{};
  /// kAtomic: flush_all() waits for it. False for words by which ranks only tell each other how far they are.
  bool counts = true;
  Completion* completion = nullptr;  ///< kGet, kAtomic, kFlush; may be null. Outlives the request
};

/// Whether requests to a peer can be issued now.
using CanIssue = std::function<bool(int peer)>;

/// Where a driver gets requests from besides its calls: a ring written by kernels. Called under the engine's lock.
class RequestSource {
 public:
  virtual ~RequestSource() = default;
  /// The next request to a peer that `can_issue` lets pass, in the order of each peer's. Null: none now.
  virtual const Request* front(const CanIssue& can_issue) = 0;
  /// The request that `front` returned last was issued.
  virtual void taken() = 0;
  /// Whether the driver's thread must not sleep, since nobody would wake it for the next request.
  virtual bool needs_polling() const = 0;
};

class Driver {
 public:
  /// Of the engine that it drives.
  static constexpr int kNumChannels = 2;

  /// `changed`: called, without the lock, after peers have changed this rank's memory or an operation has completed.
  Driver(std::unique_ptr<net::Engine> engine, const net::EngineOptions& options, std::function<void()> changed);
  /// Closes the engine: takes at most its deadline.
  ~Driver();
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  /// Applies atomics to memory that the processor cannot change in one step itself. Before start(); see EngineEvents.
  void apply_atomics_by(std::function<std::uint64_t(const net::AtomicOp&)> apply) { apply_ = std::move(apply); }
  /// Connects and starts the thread. Once.
  Status start(std::span<const net::Blob> addresses);

  /// From any thread. Issues the request, or returns false where it cannot be issued now: a fence to that peer, or too
  /// many operations, are still under way. Then progress() until it can. To a lost peer: `completion` is told so.
  bool try_issue(const Request& request);
  /// How often the completion of such a request is told: once for each part that a long get is cut into, else once.
  static std::uint64_t num_parts(const Request& request);
  /// Tells `completion` nothing any more, and leaves the destination of its gets alone (not where a network card
  /// writes there by itself).
  void forget(const Completion* completion);
  /// Begins a flush of every peer that has operations of calls under way, those of sources are their own concern;
  /// `completion` is told once for each. Returns how many there are.
  int flush_all(Completion* completion);
  /// A rank with operations without a `completion` under way that were asked for by `get_nbi`; -1: there is none.
  int find_pending_get() const;
  /// A rank whose answer to `completion` is missing, or else to a get; -1: there is none.
  int find_late(const Completion* completion) const;
  /// A rank that was lost with operations of calls which nobody has been told of, and `peer` if that is not -1; -1:
  /// there is none. The caller tells of it.
  int take_failure(int peer);

  /// Lets the network move. True if anything happened.
  bool progress();
  /// From here to end_wait() or hand_over() this thread calls progress() all the time, and the driver's thread rests.
  void begin_wait();
  void end_wait();
  /// This thread is going to sleep until `changed` wakes it: the driver's thread takes over.
  void hand_over();

  /// The source outlives the driver, or detach(). From any thread.
  void attach(RequestSource* source);
  void detach(RequestSource* source);
  /// A source that does not need polling has new requests.
  void wake();

  /// Ok while the peer is connected as far as the network knows.
  Status peer_status(int peer) const;
  std::vector<net::Path> paths();
  /// From now on the destructor takes no longer than this.
  void limit_close_time(std::int64_t timeout_ns);

 private:
  /// Sources of one or more puts, until that flush is done.
  struct Copies {
    std::uint64_t flush = 0;
    std::vector<std::byte> bytes;  // never grows beyond its capacity: engines read it
  };
  /// What is under way to a peer. Flushes are numbered; all that was issued before one is complete when it is.
  struct Peer {
    std::uint64_t num_issued = 0;      // puts and atomics since the last flush began
    std::uint64_t num_since_full = 0;  // the same since the last flush completed
    std::uint64_t flush_begun = 0;
    std::uint64_t flush_done = 0;
    std::uint64_t fence = 0;             // nothing is issued before this flush is done
    std::uint64_t calls_end = 0;         // what calls have issued is complete with this flush
    std::uint64_t num_pending_gets = 0;  // of calls
    bool has_failed = false;  // it was lost with operations of calls under way, which no quiet has reported yet
    std::deque<Copies> copies;
    std::size_t copied_bytes = 0;
    std::size_t copied_since_flush = 0;
  };
  /// An operation that the engine will report as completed.
  struct Ticket {
    int peer = 0;
    Completion* completion = nullptr;
    std::uint64_t flush = 0;   // of a flush: its number
    bool pending_get = false;  // of a get that find_pending_get() finds
  };
  /// Whether a peer is lost. `why` is written before `gone` is set, and never again.
  struct Loss {
    std::atomic<bool> gone{false};
    Status why;
  };

  Peer& at(int peer) { return peers_[static_cast<std::size_t>(peer)]; }
  bool can_issue(int peer) const;
  enum class Asker { kCall, kSource };
  void issue(const Request& request, Asker asker);
  std::span<const std::byte> copy(Peer& to, std::span<const std::byte> source);
  std::uint64_t add_ticket(const Ticket& ticket);
  void begin_flush(int peer, Completion* completion);
  void on_completed(int peer, std::uint64_t ticket, std::uint64_t value);
  void on_lost(int peer, const Status& why);
  bool serve_sources();
  bool must_poll_sources();
  bool has_unsent();
  /// What came of letting the engine move.
  struct Moved {
    bool any = false;
    bool last = false;  // in the last round: there may be more
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

  mutable std::mutex mutex_;  // the engine, and the next eight
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
  std::atomic<bool> armed_{false};  // it sleeps until the engine wakes it
  net::WakeFd wake_;
  std::thread thread_;
};

}  // namespace ferry::one_sided

#endif  // FERRY_ONE_SIDED_DRIVER_HPP
