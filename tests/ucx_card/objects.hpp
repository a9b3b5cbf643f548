#ifndef FERRY_TESTS_UCX_CARD_OBJECTS_HPP
#define FERRY_TESTS_UCX_CARD_OBJECTS_HPP

/// UCX's objects as the stand-in card has them. The mutex of their end guards those of a context (end.hpp), but for
/// what other threads use: ports, registered memory and what is atomic.

#include <ucp/api/ucp.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "ucx_card/card_mutex.hpp"
#include "ucx_card/gpu_copies.hpp"
#include "ucx_card/settings.hpp"
#include "ucx_card/sleep.hpp"
#include "ucx_card/wire.hpp"

namespace ferry::ucx_card {
class End;
}  // namespace ferry::ucx_card

struct ucp_config {
  std::string transports;
  std::map<std::string, std::string> values;  ///< all that ucp_config_modify has set, by name
};

struct ucp_context {
  ferry::ucx_card::Settings settings;
  std::uint64_t number = 0;  ///< in order of creation in this process
  bool has_cards = false;
  bool has_gpu_memory = false;
  bool has_shared_memory = false;
  bool may_write = false;       ///< UCP_FEATURE_RMA
  std::uint64_t num_paths = 1;  ///< connections of a card to a peer
  std::array<std::atomic<std::uint64_t>, ferry::ucx_card::kCallNames.size()> num_calls{};
  std::unique_ptr<ferry::ucx_card::GpuCopies> copies;  ///< null: the memory of GPUs is memory of this process
  std::shared_ptr<ferry::ucx_card::End> end;
  std::mutex random_mutex;
  std::mt19937_64 random;  ///< for the choices of calls; guarded by random_mutex

  /// Status of the next such call: UCS_OK unless it is the one to fail.
  ucs_status_t next(ferry::ucx_card::Call call);
  /// One of the two that a call may do, at random.
  bool choose() {
    const std::lock_guard lock(random_mutex);
    return std::uniform_int_distribution<int>(0, 1)(random) == 0;
  }
};

namespace ferry::ucx_card {

/// Bytes that a card has written and the GPU does not see yet.
struct Unseen {
  std::byte* at = nullptr;
  std::vector<std::byte> bytes;
};

}  // namespace ferry::ucx_card

/// Registered memory.
struct ucp_mem {
  ucp_context* context = nullptr;
  std::byte* address = nullptr;
  std::size_t num_bytes = 0;
  ucs_memory_type_t type = UCS_MEMORY_TYPE_HOST;
  std::unique_ptr<std::byte[]> allocated;
  std::uint64_t key = 0;
  std::mutex unseen_mutex;
  std::vector<ferry::ucx_card::Unseen> unseen;  ///< guarded by unseen_mutex

  bool contains(std::uint64_t first, std::size_t count) const {
    const auto begin = reinterpret_cast<std::uintptr_t>(address);
    return first >= begin && count <= num_bytes && first - begin <= num_bytes - count;
  }

  /// Keep the memory registered while a card reads or writes it. False: it is not any more.
  bool begin_use();
  void end_use() { num_uses_.fetch_sub(1); }
  /// Returns once no card uses it, and none will. Calls `help` until then.
  void end_all_uses(const std::function<void()>& help);

 private:
  std::atomic<std::uint64_t> num_uses_{0};
  std::atomic<bool> is_gone_{false};
};

struct ucp_rkey {
  std::uint64_t key = 0;
  bool may_store = false;           ///< this process may store into the memory
  bool is_gpu = false;              ///< the memory is a GPU's
  std::shared_ptr<ucp_mem> region;  ///< null: memory of another process, or not registered
};

namespace ferry::ucx_card {

/// Handle of an operation that its caller holds.
struct Request {
  ucp_send_nbx_callback_t done = nullptr;
  void* user_data = nullptr;
  ucs_status_t status = UCS_INPROGRESS;
  bool in_callback = false;
  bool released = false;  ///< by the caller
};

struct Operation {
  Call call = Call::kPut;
  std::uint64_t id = 0;        ///< in order of the endpoint's operations
  Request* request = nullptr;  ///< null: complete for the caller
  std::byte* local = nullptr;  ///< source or destination; payload of a message
  std::uint64_t remote = 0;
  std::size_t num_bytes = 0;
  std::uint64_t key = 0;
  std::shared_ptr<ucp_mem> region;  ///< at `remote`; null as in its key
  const std::byte* header = nullptr;
  std::size_t header_bytes = 0;
  bool is_copied = false;  ///< the bytes are in `copied`, and the caller may reuse its own
  std::vector<std::byte> copied;
  bool is_gpu = false;  ///< between memory of GPUs, or from such memory
  unsigned message_id = 0;
  std::size_t num_steps = 0;     ///< pieces and completions to come
  std::uint64_t wire_ns = 0;     ///< time at which the last byte has passed the wires; 0: they have no limit
  std::uint64_t arrives_ns = 0;  ///< with `steady`: time at which it arrives
  std::size_t num_unplaced = 0;  ///< pieces that the peer's memory does not have
  bool is_moving = false;        ///< copies of all pieces have begun
  std::uint64_t behind = 0;      ///< of a put that was held: the operations before this one are in place
  ucs_status_t status = UCS_OK;  ///< result of a close
};

/// Something that a worker's owner learns from its next progress.
struct News {
  Request* request = nullptr;            ///< completed with `status`
  std::shared_ptr<ucp_ep> failed{};      ///< with `status`
  std::shared_ptr<Operation> message{};  ///< arrived
  ucs_status_t status = UCS_OK;
  std::uint64_t due_ns = 0;  ///< the owner learns it from then on
};

/// A worker as other ends see it. It may outlive the worker.
class Port {
 public:
  /// Takes the descriptor, which becomes readable.
  Port(std::shared_ptr<End> end, const ucp_context* context, std::uint64_t id, int event_fd);
  ~Port();
  Port(const Port&) = delete;
  Port& operator=(const Port&) = delete;

  const std::shared_ptr<End>& end() const { return end_; }
  const ucp_context* context() const { return context_; }  ///< not to be read from, unless the port is open
  std::uint64_t id() const { return id_; }
  int event_fd() const { return event_fd_; }

  bool is_open() const { return is_open_; }
  /// The worker is gone.
  void close();
  /// False if the port is closed.
  bool tell(News news);
  bool has_news() const {
    const std::uint64_t first_due_ns = first_due_ns_;
    return first_due_ns == 0 || (first_due_ns != kNever && first_due_ns <= now_ns());
  }
  /// Moves news that are due to `taken`, which is empty.
  void take(std::size_t at_most, std::vector<News>* taken);
  /// False if there are news; else the next ones signal the descriptor.
  bool arm();

  Wire sends;
  Wire receives;

 private:
  const std::shared_ptr<End> end_;
  const ucp_context* const context_;
  const std::uint64_t id_;
  const int event_fd_;
  std::atomic<bool> is_open_{true};
  // Apart from what the worker's owner looks at all the time.
  alignas(kLineBytes) CardMutex mutex_;  // guards the next three
  bool is_armed_ = false;
  std::deque<News> news_;
  std::deque<News> coming_;  // those that have a time; of one sender in its order
  alignas(kLineBytes) std::atomic<std::uint64_t> first_due_ns_{kNever};
};

}  // namespace ferry::ucx_card

struct ucp_worker {
  ucp_context* context = nullptr;
  std::shared_ptr<ferry::ucx_card::Port> port;
  ucp_am_recv_callback_t receive = nullptr;
  void* receiver = nullptr;
  std::vector<ferry::ucx_card::News> taken;  ///< of its progress
  std::set<std::shared_ptr<ucp_ep>> endpoints;
  std::set<std::shared_ptr<ferry::ucx_card::Operation>> closes;  ///< of endpoints, under way
};

struct ucp_ep : std::enable_shared_from_this<ucp_ep> {
  ucp_worker* worker = nullptr;  ///< not to be read from once the endpoint is closed
  std::shared_ptr<ferry::ucx_card::End> end;
  std::uint64_t process = 0;                    ///< of the peer
  std::uint64_t target = 0;                     ///< id of the peer's worker
  std::shared_ptr<ferry::ucx_card::Port> peer;  ///< null: in another process, or not there
  ucp_err_handler_cb_t on_failure = nullptr;
  void* failure_argument = nullptr;
  std::atomic<ucs_status_t> failure{UCS_OK};
  std::atomic<bool> closed{false};
  std::atomic<std::uint64_t> num_unfinished{0};  ///< puts and gets that calls began and that have not ended
  std::uint64_t num_operations = 0;
  std::uint64_t fence = 0;  ///< id of the last fence; puts after it are held until those before it are in place
  std::deque<std::shared_ptr<ferry::ucx_card::Operation>> held;
  std::map<std::uint64_t, std::shared_ptr<ferry::ucx_card::Operation>> unfinished;  ///< puts and gets, by id
  std::deque<std::shared_ptr<ferry::ucx_card::Operation>> messages;                 ///< on their way, in order
  std::vector<std::shared_ptr<ferry::ucx_card::Operation>> flushes;  ///< that wait for earlier operations
  std::vector<std::shared_ptr<ferry::ucx_card::Operation>> flushed;  ///< to be completed by an event
};

#endif  // FERRY_TESTS_UCX_CARD_OBJECTS_HPP
