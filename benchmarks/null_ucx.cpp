/// Functions of UCX that Ferry calls, for proxy_chunks.cpp: an end of a network in one process whose operations cost
/// next to nothing. Puts of more than 64 bytes copy nothing. A put, a get and a flush are complete after as many of the
/// worker's calls of progress as FERRY_NULL_UCX_POLLS says, at once if it is 0. Messages arrive in order, with the next
/// call of progress of the peer. Nothing fails.

#include <sys/eventfd.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

namespace {

/// The caller's handle of an operation.
struct Request {
  ucp_send_nbx_callback_t done = nullptr;
  void* user_data = nullptr;
  std::uint64_t due = 0;  // number of the progress that completes it
};

/// Messages on their way to a worker, one after the other.
struct Inbox {
  struct Entry {
    std::size_t header_bytes = 0;
    std::size_t num_bytes = 0;
  };
  std::vector<Entry> entries;
  std::vector<std::byte> bytes;

  void clear() {
    entries.clear();
    bytes.clear();
  }
};

void* copy_of(void* pointer, std::size_t* num_bytes) {
  *num_bytes = sizeof pointer;
  void* copy = std::malloc(sizeof pointer);
  std::memcpy(copy, &pointer, sizeof pointer);
  return copy;
}

ucs_status_ptr_t done_at_once() { return nullptr; }

}  // namespace

struct ucp_context {};
struct ucp_config {};
struct ucp_rkey {};

struct ucp_mem {
  void* address = nullptr;
  std::size_t num_bytes = 0;
  std::unique_ptr<std::byte[]> allocated;
};

struct ucp_worker {
  int event_fd = -1;
  std::uint64_t num_polls_of_operation = 0;
  std::uint64_t num_polls = 0;
  std::deque<Request> requests;  // of all operations ever; their addresses are stable
  std::vector<Request*> spare;
  std::deque<Request*> pending;  // in the order in which they are due
  ucp_am_recv_callback_t receive = nullptr;
  void* receiver = nullptr;
  Inbox delivering;
  std::atomic<bool> has_messages{false};
  std::mutex mutex;  // guards the members below
  Inbox inbox;
  bool is_armed = false;
};

struct ucp_ep {
  ucp_worker* worker = nullptr;
  ucp_worker* target = nullptr;
};

namespace {

std::mutex workers_mutex;
std::vector<std::unique_ptr<ucp_worker>> workers;

ucs_status_ptr_t begin(ucp_worker* worker, const ucp_request_param_t& params) {
  if (worker->num_polls_of_operation == 0) return done_at_once();
  if (worker->spare.empty()) worker->spare.push_back(&worker->requests.emplace_back());
  Request* request = worker->spare.back();
  worker->spare.pop_back();
  *request = {params.cb.send, params.user_data, worker->num_polls + worker->num_polls_of_operation};
  worker->pending.push_back(request);
  return request;
}

}  // namespace

extern "C" {

void ucp_get_version(unsigned* major, unsigned* minor, unsigned* release) {
  *major = UCP_API_MAJOR;
  *minor = UCP_API_MINOR;
  *release = 0;
}

ucs_status_t ucp_config_read(const char* /*prefix*/, const char* /*file*/, ucp_config_t** config) {
  *config = new ucp_config;
  return UCS_OK;
}

ucs_status_t ucp_config_modify(ucp_config_t* /*config*/, const char* /*name*/, const char* /*value*/) { return UCS_OK; }

void ucp_config_release(ucp_config_t* config) { delete config; }

ucs_status_t ucp_init_version(unsigned /*major*/, unsigned /*minor*/, const ucp_params_t* /*params*/,
                              const ucp_config_t* /*config*/, ucp_context_h* context) {
  *context = new ucp_context;
  return UCS_OK;
}

void ucp_cleanup(ucp_context_h context) { delete context; }

ucs_status_t ucp_context_query(ucp_context_h /*context*/, ucp_context_attr_t* attributes) {
  attributes->memory_types = UCS_BIT(UCS_MEMORY_TYPE_HOST) | UCS_BIT(UCS_MEMORY_TYPE_CUDA);
  return UCS_OK;
}

ucs_status_t ucp_mem_map(ucp_context_h /*context*/, const ucp_mem_map_params_t* params, ucp_mem_h* memory) {
  auto mapped = std::make_unique<ucp_mem>();
  mapped->num_bytes = params->length;
  if ((params->field_mask & UCP_MEM_MAP_PARAM_FIELD_ADDRESS) != 0) {
    mapped->address = params->address;
  } else {
    constexpr std::size_t kAlignment = 4096;
    mapped->allocated = std::make_unique<std::byte[]>(params->length + kAlignment);
    mapped->address = mapped->allocated.get();
    std::size_t room = params->length + kAlignment;
    std::align(kAlignment, params->length, mapped->address, room);
  }
  *memory = mapped.release();
  return UCS_OK;
}

ucs_status_t ucp_mem_query(const ucp_mem_h memory, ucp_mem_attr_t* attributes) {
  attributes->address = memory->address;
  attributes->length = memory->num_bytes;
  return UCS_OK;
}

ucs_status_t ucp_mem_unmap(ucp_context_h /*context*/, ucp_mem_h memory) {
  delete memory;
  return UCS_OK;
}

ucs_status_t ucp_rkey_pack(ucp_context_h /*context*/, ucp_mem_h memory, void** buffer, size_t* num_bytes) {
  *buffer = copy_of(memory, num_bytes);
  return UCS_OK;
}

void ucp_rkey_buffer_release(void* buffer) { std::free(buffer); }

ucs_status_t ucp_ep_rkey_unpack(ucp_ep_h /*endpoint*/, const void* /*buffer*/, ucp_rkey_h* key) {
  *key = new ucp_rkey;
  return UCS_OK;
}

ucs_status_t ucp_rkey_ptr(ucp_rkey_h /*key*/, uint64_t /*remote*/, void** /*local*/) { return UCS_ERR_UNSUPPORTED; }

void ucp_rkey_destroy(ucp_rkey_h key) { delete key; }

ucs_status_t ucp_worker_create(ucp_context_h /*context*/, const ucp_worker_params_t* /*params*/, ucp_worker_h* worker) {
  auto created = std::make_unique<ucp_worker>();
  created->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (created->event_fd < 0) return UCS_ERR_IO_ERROR;
  if (const char* polls = std::getenv("FERRY_NULL_UCX_POLLS"); polls != nullptr) {
    created->num_polls_of_operation = std::strtoull(polls, nullptr, 10);
  }
  *worker = created.get();
  const std::lock_guard lock(workers_mutex);
  workers.push_back(std::move(created));
  return UCS_OK;
}

void ucp_worker_destroy(ucp_worker_h worker) {
  const std::lock_guard lock(worker->mutex);
  worker->is_armed = false;
  ::close(worker->event_fd);  // the worker itself stays, because peers may still send to it
}

ucs_status_t ucp_worker_get_address(ucp_worker_h worker, ucp_address_t** address, size_t* num_bytes) {
  *address = static_cast<ucp_address_t*>(copy_of(worker, num_bytes));
  return UCS_OK;
}

void ucp_worker_release_address(ucp_worker_h /*worker*/, ucp_address_t* address) { std::free(address); }

ucs_status_t ucp_worker_get_efd(ucp_worker_h worker, int* fd) {
  *fd = worker->event_fd;
  return UCS_OK;
}

ucs_status_t ucp_worker_set_am_recv_handler(ucp_worker_h worker, const ucp_am_handler_param_t* handler) {
  worker->receive = handler->cb;
  worker->receiver = handler->arg;
  return UCS_OK;
}

ucs_status_t ucp_ep_create(ucp_worker_h worker, const ucp_ep_params_t* params, ucp_ep_h* endpoint) {
  auto created = std::make_unique<ucp_ep>();
  created->worker = worker;
  std::memcpy(static_cast<void*>(&created->target), params->address, sizeof created->target);
  *endpoint = created.release();
  return UCS_OK;
}

void ucp_ep_print_info(const ucp_ep_h /*endpoint*/, FILE* stream) {
  std::fputs("#                 lane[0]:  0:rc_mlx5/mlx5_0:1.0 md[1] -> md[1]/ib/sysdev[255] rma am wireup\n", stream);
}

ucs_status_ptr_t ucp_ep_close_nbx(ucp_ep_h endpoint, const ucp_request_param_t* /*params*/) {
  delete endpoint;
  return done_at_once();
}

ucs_status_ptr_t ucp_put_nbx(ucp_ep_h endpoint, const void* buffer, size_t count, uint64_t remote, ucp_rkey_h /*key*/,
                             const ucp_request_param_t* params) {
  constexpr size_t kMaxCopied = 64;
  if (count <= kMaxCopied) std::memcpy(reinterpret_cast<void*>(remote), buffer, count);
  return begin(endpoint->worker, *params);
}

ucs_status_ptr_t ucp_get_nbx(ucp_ep_h endpoint, void* buffer, size_t count, uint64_t remote, ucp_rkey_h /*key*/,
                             const ucp_request_param_t* params) {
  std::memcpy(buffer, reinterpret_cast<const void*>(remote), count);
  return begin(endpoint->worker, *params);
}

ucs_status_ptr_t ucp_ep_flush_nbx(ucp_ep_h endpoint, const ucp_request_param_t* params) {
  return begin(endpoint->worker, *params);
}

ucs_status_t ucp_worker_fence(ucp_worker_h /*worker*/) { return UCS_OK; }

ucs_status_ptr_t ucp_am_send_nbx(ucp_ep_h endpoint, unsigned /*id*/, const void* header, size_t header_bytes,
                                 const void* buffer, size_t count, const ucp_request_param_t* /*params*/) {
  ucp_worker& target = *endpoint->target;
  const auto* first = static_cast<const std::byte*>(header);
  const auto* second = static_cast<const std::byte*>(buffer);
  const std::lock_guard lock(target.mutex);
  target.inbox.entries.push_back({header_bytes, count});
  target.inbox.bytes.insert(target.inbox.bytes.end(), first, first + header_bytes);
  if (count > 0) target.inbox.bytes.insert(target.inbox.bytes.end(), second, second + count);
  target.has_messages.store(true, std::memory_order_release);
  if (target.is_armed) {
    target.is_armed = false;
    const std::uint64_t one = 1;
    (void)!::write(target.event_fd, &one, sizeof one);
  }
  return done_at_once();
}

unsigned ucp_worker_progress(ucp_worker_h worker) {
  unsigned num_events = 0;
  ++worker->num_polls;
  while (!worker->pending.empty() && worker->pending.front()->due <= worker->num_polls) {
    Request* request = worker->pending.front();
    worker->pending.pop_front();
    request->done(request, UCS_OK, request->user_data);
    worker->spare.push_back(request);
    ++num_events;
  }
  if (!worker->has_messages.load(std::memory_order_acquire)) return num_events;
  {
    const std::lock_guard lock(worker->mutex);
    std::swap(worker->inbox, worker->delivering);
    worker->has_messages.store(false, std::memory_order_relaxed);
  }
  std::byte* bytes = worker->delivering.bytes.data();
  const ucp_am_recv_param_t param{};
  for (const Inbox::Entry& entry : worker->delivering.entries) {
    worker->receive(worker->receiver, bytes, entry.header_bytes, bytes + entry.header_bytes, entry.num_bytes, &param);
    bytes += entry.header_bytes + entry.num_bytes;
    ++num_events;
  }
  worker->delivering.clear();
  return num_events;
}

ucs_status_t ucp_worker_arm(ucp_worker_h worker) {
  const std::lock_guard lock(worker->mutex);
  if (!worker->pending.empty() || !worker->inbox.entries.empty()) return UCS_ERR_BUSY;
  std::uint64_t count = 0;
  (void)!::read(worker->event_fd, &count, sizeof count);
  worker->is_armed = true;
  return UCS_OK;
}

ucs_status_t ucp_request_check_status(void* /*request*/) { return UCS_INPROGRESS; }

void ucp_request_free(void* /*request*/) {}

}  // extern "C"
