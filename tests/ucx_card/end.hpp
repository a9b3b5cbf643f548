#ifndef FERRY_TESTS_UCX_CARD_END_HPP
#define FERRY_TESTS_UCX_CARD_END_HPP

/// The card of one context, which moves the bytes of its operations, each at a random time: by a thread of its own, or
/// in the progress of its workers.
///
/// Locks: the mutex of an end, then at most one of those that are held for a moment and under which no other is taken:
/// an end's inbox, its sleep, a port's news, the lists of Card, the wires between processes. No thread has the mutexes
/// of two ends: what an end does at another one goes into the port, the memory or the inbox of that one.

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include "ucx_card/card_mutex.hpp"
#include "ucx_card/objects.hpp"
#include "ucx_card/sleep.hpp"

namespace ferry::ucx_card {

/// A peer whose worker or process is gone, or who has closed an endpoint.
struct Departure {
  static constexpr std::uint64_t kAnyWorker = 0;
  std::uint64_t worker = kAnyWorker;  ///< of the end that is told
  std::uint64_t process = 0;          ///< of the peer
  std::uint64_t target = kAnyWorker;  ///< the peer's worker
};

class End : public std::enable_shared_from_this<End> {
 public:
  explicit End(const ucp_context& context);
  End(const End&) = delete;
  End& operator=(const End&) = delete;
  /// After stop().
  ~End() = default;

  /// Ends the thread. What is under way stays as it is until clear().
  void stop();
  void clear();

  bool spins() const { return spins_; }

  /// The mutex, after what others have left in the inbox has been done.
  std::unique_lock<CardMutex> enter();

  // Without the mutex.
  /// Begins an operation. `later`: the endpoint fails with it afterwards.
  void begin(std::shared_ptr<ucp_ep> endpoint, std::shared_ptr<Operation> operation, ucs_status_t later);
  /// Endpoints to the peer fail at a later time.
  void tell(const Departure& departure);
  /// The card of another process has answered a request.
  void take_answer(const std::shared_ptr<ucp_ep>& endpoint, Operation* operation, std::size_t begin,
                   ucs_status_t status, std::span<const std::byte> payload);

  /// Does what is due, where the end has no thread. May be called at any time.
  void progress();
  bool has_thread() const { return settings_.thread != 0; }

  /// Has those who wait for copies of this end see them end. May be called at any time.
  void poll_copies();
  /// Returns once all copies that have begun have ended, or a time has passed that none takes.
  void finish_copies();

  // With the mutex.
  /// Copies of this end, which it polls from now on; null: none any more.
  void use(GpuCopies* copies) { copies_ = copies; }
  void add(ucp_worker* worker);
  void remove(ucp_worker* worker) { workers_.erase(worker->port->id()); }
  void fail_later(ucp_ep* endpoint, ucs_status_t status);
  /// Cancels the endpoint's operations. The peer's endpoint fails. `operation`: the close, if the caller waits for it.
  void close(ucp_ep* endpoint, const std::shared_ptr<Operation>& operation = nullptr);

 private:
  enum class What { kPiece, kArrived, kCompletion, kMessage, kFlushed, kFailure, kClosed };
  struct Event {
    std::uint64_t due_ns = 0;
    std::uint64_t order = 0;  // among events that are due
    What what = What::kPiece;
    std::shared_ptr<ucp_ep> endpoint{};
    std::shared_ptr<Operation> operation{};
    std::size_t begin = 0;
    std::size_t end = 0;
    ucs_status_t status = UCS_OK;

    bool operator<(const Event& other) const {
      return due_ns != other.due_ns ? due_ns > other.due_ns : order > other.order;
    }
  };
  enum class Reason { kBegin, kDeparture };
  struct Mail {
    Reason reason = Reason::kBegin;
    std::shared_ptr<ucp_ep> endpoint{};
    std::shared_ptr<Operation> operation{};
    ucs_status_t status = UCS_OK;
    Departure departure{};
  };

  void post(Mail mail);
  void take_mail();
  void run();
  bool run_due();
  void wait(std::unique_lock<CardMutex>& lock);
  /// The event comes after a delay of the card from `not_before_ns` on, or from now on.
  void schedule(Event event, std::uint64_t not_before_ns = 0);
  void add(Event event, std::uint64_t due_ns);
  std::uint64_t reserve_wires(const ucp_ep& endpoint, const Operation& operation);
  bool sends_ahead(const ucp_ep& endpoint) const;
  void start(const std::shared_ptr<ucp_ep>& endpoint, std::shared_ptr<Operation> operation, ucs_status_t later);
  void start_transfer(const std::shared_ptr<ucp_ep>& endpoint, const std::shared_ptr<Operation>& operation);
  void start_pieces(const std::shared_ptr<ucp_ep>& endpoint, const std::shared_ptr<Operation>& operation);
  void place(const std::shared_ptr<ucp_ep>& endpoint, Operation* operation);
  void handle(const Event& event);
  void move(const std::shared_ptr<ucp_ep>& endpoint, const std::shared_ptr<Operation>& operation, std::size_t begin,
            std::size_t end);
  bool start_copy(const std::shared_ptr<ucp_ep>& endpoint, const std::shared_ptr<Operation>& operation,
                  std::size_t begin, std::size_t end);
  bool start_word(const std::shared_ptr<ucp_ep>& endpoint, const std::shared_ptr<Operation>& operation);
  GpuCopies::Done when_copied(const std::shared_ptr<ucp_ep>& endpoint, const std::shared_ptr<Operation>& operation);
  void ask(const std::shared_ptr<ucp_ep>& endpoint, const std::shared_ptr<Operation>& operation, std::size_t begin,
           std::size_t end);
  void deliver(const std::shared_ptr<ucp_ep>& endpoint);
  void finish_step(ucp_ep* endpoint, Operation* operation);
  void check_flushes(ucp_ep* endpoint);
  void complete(ucp_ep* endpoint, Operation* operation, ucs_status_t status);
  void end_all(ucp_ep* endpoint, ucs_status_t status);
  void fail(ucp_ep* endpoint, ucs_status_t status);
  void fail_endpoints(const Departure& departure);

  const Settings settings_;
  const bool spins_;
  CardMutex mutex_;  // guards all but the inbox and what is atomic
  std::map<std::uint64_t, ucp_worker*> workers_;
  std::mt19937_64 random_;
  std::vector<Event> events_;  // a heap
  std::uint64_t num_scheduled_ = 0;
  std::thread thread_;  // from the first worker on
  std::vector<Mail> taken_;
  GpuCopies* copies_ = nullptr;

  std::atomic<std::uint64_t> num_copying_{0};
  std::atomic<std::uint64_t> next_due_ns_{~std::uint64_t{0}};  // of the first event
  std::atomic<bool> is_stopping_{false};
  Sleep sleep_;
  // Apart from what the thread looks at all the time.
  alignas(kLineBytes) CardMutex inbox_mutex_;
  std::vector<Mail> inbox_;  // guarded by inbox_mutex_
  alignas(kLineBytes) std::atomic<bool> has_mail_{false};
};

}  // namespace ferry::ucx_card

#endif  // FERRY_TESTS_UCX_CARD_END_HPP
