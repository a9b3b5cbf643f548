#ifndef FERRY_TESTS_UCX_CARD_OBJECTS_HPP
#define FERRY_TESTS_UCX_CARD_OBJECTS_HPP

/// UCX's objects as the stand-in card has them. One mutex, Card::mutex, guards them, but for news of workers.

#include <ucp/api/ucp.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "ucx_card/card_mutex.hpp"
#include "ucx_card/gpu_copies.hpp"
#include "ucx_card/settings.hpp"

struct ucp_config {
  std::string transports;
  std::map<std::string, std::string> values;  ///< all that ucp_config_modify has set, by name
};

struct ucp_context {
  ferry::ucx_card::Settings settings;
  std::uint64_t number = 0;  ///< in order of creation in this process
  std::mt19937_64 random;
  bool has_cards = false;
  bool has_gpu_memory = false;
  bool has_shared_memory = false;
  bool may_write = false;       ///< UCP_FEATURE_RMA
  std::uint64_t num_paths = 1;  ///< connections of a card to a peer
  std::array<std::uint64_t, ferry::ucx_card::kCallNames.size()> num_calls{};
  std::unique_ptr<ferry::ucx_card::GpuCopies> copies;  ///< null: the memory of GPUs is memory of this process

  /// Status of the next such call: UCS_OK unless it is the one to fail.
  ucs_status_t next(ferry::ucx_card::Call call);
  /// Random number below `bound`, which is not 0.
  std::uint64_t below(std::uint64_t bound) {
    return std::uniform_int_distribution<std::uint64_t>(0, bound - 1)(random);
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
  std::vector<ferry::ucx_card::Unseen> unseen;

  bool contains(std::uint64_t first, std::size_t count) const {
    const auto begin = reinterpret_cast<std::uintptr_t>(address);
    return first >= begin && count <= num_bytes && first - begin <= num_bytes - count;
  }
};

struct ucp_rkey {
  std::uint64_t key = 0;
  bool may_store = false;  ///< this process may store into the memory
  bool is_gpu = false;     ///< the memory is a GPU's
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
  const std::byte* header = nullptr;
  std::size_t header_bytes = 0;
  bool is_copied = false;  ///< the bytes are in `copied`, and the caller may reuse its own
  std::vector<std::byte> copied;
  bool is_gpu = false;  ///< between memory of GPUs, or from such memory
  unsigned message_id = 0;
  std::size_t num_steps = 0;     ///< pieces and completions to come
  std::uint64_t wire_ns = 0;     ///< time at which the last byte has passed the wires; 0: they have no limit
  ucs_status_t status = UCS_OK;  ///< result of a close
};

/// Something that a worker's owner learns from its next progress.
struct News {
  Request* request = nullptr;            ///< completed with `status`
  std::shared_ptr<ucp_ep> failed{};      ///< with `status`
  std::shared_ptr<Operation> message{};  ///< arrived
  ucs_status_t status = UCS_OK;
};

}  // namespace ferry::ucx_card

struct ucp_worker {
  ucp_context* context = nullptr;
  std::uint64_t id = 0;
  int event_fd = -1;
  ferry::ucx_card::CardMutex news_mutex;  ///< guards the next three; taken after Card::mutex, if both are
  bool armed = false;
  std::atomic<bool> has_news{false};
  std::deque<ferry::ucx_card::News> news;
  std::uint64_t sends_until_ns = 0;  ///< time until which its wires are busy, in each direction
  std::uint64_t receives_until_ns = 0;
  ucp_am_recv_callback_t receive = nullptr;
  void* receiver = nullptr;
  std::set<std::shared_ptr<ucp_ep>> endpoints;
  std::set<std::shared_ptr<ferry::ucx_card::Operation>> closes;  ///< of endpoints, under way
};

struct ucp_ep : std::enable_shared_from_this<ucp_ep> {
  ucp_worker* worker = nullptr;
  std::uint64_t process = 0;  ///< of the peer
  std::uint64_t target = 0;   ///< id of the peer's worker
  ucp_err_handler_cb_t on_failure = nullptr;
  void* failure_argument = nullptr;
  ucs_status_t failure = UCS_OK;
  bool closed = false;
  std::uint64_t num_operations = 0;
  std::map<std::uint64_t, std::shared_ptr<ferry::ucx_card::Operation>> unfinished;  ///< all but flushes, by id
  std::deque<std::shared_ptr<ferry::ucx_card::Operation>> messages;                 ///< on their way, in order
  std::vector<std::shared_ptr<ferry::ucx_card::Operation>> flushes;  ///< that wait for earlier operations
  std::vector<std::shared_ptr<ferry::ucx_card::Operation>> flushed;  ///< to be completed by an event
};

#endif  // FERRY_TESTS_UCX_CARD_OBJECTS_HPP
