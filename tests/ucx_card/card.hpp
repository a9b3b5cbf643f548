#ifndef FERRY_TESTS_UCX_CARD_CARD_HPP
#define FERRY_TESTS_UCX_CARD_CARD_HPP

/// The card of this process: a thread that moves the bytes of all operations, each at a random time.

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <queue>
#include <thread>
#include <vector>

#include "ucx_card/card_mutex.hpp"
#include "ucx_card/objects.hpp"
#include "ucx_card/wires.hpp"

namespace ferry::ucx_card {

/// A piece of a put or get, in memory of the process whose card reads or writes it.
struct Range {
  std::uint64_t worker = 0;
  std::uint64_t key = 0;
  std::uint64_t remote = 0;  ///< address of the whole put or get
  std::size_t num_bytes = 0;
  std::size_t begin = 0;
  std::size_t end = 0;
};

class Card {
 public:
  /// Never destroyed.
  static Card& instance();

  /// Start with the first context of the process and stop with the last one. Call without the mutex.
  void add_context(ucp_context* context);
  void remove_context(ucp_context* context);

  /// Guards the members below, all objects, and the calls that follow.
  CardMutex mutex;
  std::map<std::uint64_t, ucp_worker*> workers;
  std::map<std::uint64_t, ucp_mem*> memory;
  std::map<std::string, std::string> configured;  ///< settings of the last context that has cards
  std::uint64_t new_id() { return ++last_id_; }
  std::uint64_t process() const { return wires_.process(); }
  /// True if a put or get is from or to registered memory of a GPU of this host.
  bool is_gpu_memory(const Operation& operation, bool local_is_gpu) const;
  /// Finds the peer of a new endpoint, which fails if there is none.
  void connect(ucp_ep* endpoint);

  /// Begin an operation, whose `id` they set.
  void start_transfer(ucp_ep* endpoint, const std::shared_ptr<Operation>& operation);
  void start_message(ucp_ep* endpoint, const std::shared_ptr<Operation>& operation);
  void start_flush(ucp_ep* endpoint, const std::shared_ptr<Operation>& operation);
  /// Ends the endpoint's operations with the status, now or at a later time.
  void fail(ucp_ep* endpoint, ucs_status_t status);
  void fail_later(ucp_ep* endpoint, ucs_status_t status);
  /// Cancels the endpoint's operations. The peer's endpoint fails. `operation`: the close, if the caller waits for it.
  void close(ucp_ep* endpoint, const std::shared_ptr<Operation>& operation = nullptr);
  /// Removes a worker whose endpoints are closed. Peers' endpoints to it fail.
  void remove(ucp_worker* worker);
  void tell(ucp_worker* worker, News news);

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

  static constexpr std::uint64_t kAnyWorker = 0;
  /// A request to the card of another process.
  struct Asked {
    std::shared_ptr<ucp_ep> endpoint;
    std::shared_ptr<Operation> operation;
    std::size_t begin = 0;
  };

  void run();
  void run_due(std::unique_lock<CardMutex>& lock);
  void spin(std::unique_lock<CardMutex>& lock);
  void look_at_wires(std::unique_lock<CardMutex>& lock);
  /// The event comes after a delay of the card from `not_before_ns` on, or from now on.
  void schedule(Event event, std::uint64_t not_before_ns = 0);
  std::uint64_t reserve_wires(const ucp_ep& endpoint, std::size_t num_bytes);
  void handle(const Event& event);
  void move(const std::shared_ptr<ucp_ep>& endpoint, const std::shared_ptr<Operation>& operation, std::size_t begin,
            std::size_t end);
  bool start_copy(const std::shared_ptr<ucp_ep>& endpoint, const std::shared_ptr<Operation>& operation,
                  const Range& range);
  /// The bytes of a copy are there; call with the mutex.
  void take_copied(Event arrived);
  void take_all_copied();
  void deliver(ucp_ep* endpoint);
  void finish_step(ucp_ep* endpoint, Operation* operation);
  void complete(ucp_ep* endpoint, Operation* operation, ucs_status_t status);
  void end_all(ucp_ep* endpoint, ucs_status_t status);
  void fail_endpoints(const ucp_worker& of, std::uint64_t process, std::uint64_t target);
  ucp_mem* memory_at(const Range& range, ucs_status_t* status);
  ucs_status_t read_memory(const Range& range, std::byte* into);
  ucs_status_t write_memory(const Range& range, const std::byte* source);
  void ask(Frame frame, Wires::Payload payload, Asked asked);
  void receive(int wire, const Frame& frame, Wires::Payload payload);
  ucs_status_t take_message(const Frame& frame, Wires::Payload payload);
  void take_answer(const Frame& frame, Wires::Payload payload);
  void lose(std::uint64_t process);
  void check_flushes(ucp_ep* endpoint);

  std::mutex life_mutex_;
  std::uint64_t num_contexts_ = 0;
  std::uint64_t num_created_ = 0;
  std::thread thread_;
  bool stopping_ = false;
  Wires wires_;
  bool spins_ = false;
  CardMutex copied_mutex_;
  std::vector<Event> copied_;  // guarded by copied_mutex_: copies that have ended, for a thread that spins
  std::atomic<bool> has_copied_{false};
  std::atomic<std::uint64_t> next_due_ns_{0};  // of the first event, for a thread that spins
  std::uint64_t next_look_ns_ = 0;
  std::uint64_t num_scheduled_ = 0;
  std::uint64_t num_handled_ = 0;
  std::uint64_t last_ticket_ = 0;
  std::map<std::uint64_t, Asked> asked_;
  std::uint64_t last_id_ = 0;
  std::priority_queue<Event> events_;
};

}  // namespace ferry::ucx_card

#endif  // FERRY_TESTS_UCX_CARD_CARD_HPP
