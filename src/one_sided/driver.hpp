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
/// requests are issued by whoever drives, in its order.
///
///   word            writer        readers  order                   publishes
///   the engine      lock holder   same     the lock                everything but the two below
///   asleep          the thread    callers  seq_cst                 nothing; a caller that left work behind wakes it
///   num_drivers     callers       thread   relaxed                 nothing; the thread leaves polling to them

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <unordered_map>
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
  Completion* completion = nullptr;  ///< kGet, kAtomic, kFlush; may be null. Outlives the request
};

/// Where a driver gets requests from besides its calls: a ring written by kernels. Called under the engine's lock.
class RequestSource {
 public:
  virtual ~RequestSource() = default;
  /// The next request, if there is one; the same again until `taken`. Null: none now.
  virtual const Request* front() = 0;
  /// The request at the front was issued.
  virtual void taken() = 0;
  /// Whether the driver's thread must not sleep, since nobody would wake it for the next request.
  virtual bool needs_polling() const = 0;
};

class Driver {
 public:
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
  /// Tells `completion` nothing any more, and leaves the destination of its gets alone (not where a network card
  /// writes there by itself).
  void forget(const Completion* completion);
  /// Begins a flush of every peer that has operations under way; `completion` is told once for each. Returns how many
  /// there are.
  int flush_all(Completion* completion);
  /// A rank with operations without a `completion` under way that were asked for by `get_nbi`; -1: there is none.
  int find_pending_get() const;

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
  std::function<std::uint64_t(const net::AtomicOp&)> apply_;
};

}  // namespace ferry::one_sided

#endif  // FERRY_ONE_SIDED_DRIVER_HPP
