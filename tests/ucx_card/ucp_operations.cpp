/// Operations of endpoints of the stand-in card, and the progress of workers.

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "ucx_card/end.hpp"
#include "ucx_card/progress.hpp"

namespace ferry::ucx_card {
namespace {

/// Maximum number of news that one call of progress tells.
constexpr std::size_t kMaxNews = 16;

ucs_status_ptr_t pointer_of(ucs_status_t status) {
  return reinterpret_cast<ucs_status_ptr_t>(static_cast<std::intptr_t>(status));
}

void tell_owner(Request* request, ucs_status_t status) {
  request->status = status;
  request->in_callback = true;
  if (request->done != nullptr) request->done(request, status, request->user_data);
  request->in_callback = false;
  if (request->released) delete request;
}

void tell_owner(ucp_worker* worker, Operation& message) {
  if (worker->receive == nullptr) return;
  std::byte* const bytes = message.copied.data();
  ucp_am_recv_param_t param{};
  worker->receive(worker->receiver, bytes, message.header_bytes, bytes + message.header_bytes, message.num_bytes,
                  &param);
}

void tell_owner(ucp_worker* worker, const News& news) {
  if (news.request != nullptr) tell_owner(news.request, news.status);
  if (news.message != nullptr) tell_owner(worker, *news.message);
  if (news.failed != nullptr && !news.failed->closed) {
    news.failed->on_failure(news.failed->failure_argument, news.failed.get(), news.status);
  }
}

Request* new_request(const ucp_request_param_t& params) {
  auto* request = new Request;
  if ((params.op_attr_mask & UCP_OP_ATTR_FIELD_CALLBACK) != 0) request->done = params.cb.send;
  if ((params.op_attr_mask & UCP_OP_ATTR_FIELD_USER_DATA) != 0) request->user_data = params.user_data;
  return request;
}

/// Result of a call: the request if the operation has one, else that it is complete.
ucs_status_ptr_t begun(Request* request) { return request != nullptr ? request : pointer_of(UCS_OK); }

/// Whether the caller says that its own memory is a GPU's.
bool is_gpu_memory(const ucp_request_param_t& params) {
  return (params.op_attr_mask & UCP_OP_ATTR_FIELD_MEMORY_TYPE) != 0 && params.memory_type == UCS_MEMORY_TYPE_CUDA;
}

bool lies_in_its_memory([[maybe_unused]] const void* local, [[maybe_unused]] std::size_t num_bytes,
                        [[maybe_unused]] const ucp_request_param_t& params) {
#if UCP_API_VERSION >= UCP_VERSION(1, 13)
  if ((params.op_attr_mask & UCP_OP_ATTR_FIELD_MEMH) == 0) return true;
  return params.memh != nullptr && params.memh->contains(reinterpret_cast<std::uintptr_t>(local), num_bytes);
#else
  return true;
#endif
}

/// Status with which a call is refused. If the call is to fail later, notes that in `later`.
ucs_status_t check(ucp_ep* endpoint, Call call, ucs_status_t* later) {
  if (endpoint->closed) return UCS_ERR_INVALID_PARAM;
  if (endpoint->failure != UCS_OK) return endpoint->failure;
  ucp_context& context = *endpoint->worker->context;
  const ucs_status_t status = context.next(call);
  if (context.settings.now != 0) return status;
  *later = status;
  return UCS_OK;
}

ucs_status_ptr_t transfer(Call call, ucp_ep* endpoint, std::byte* local, std::size_t num_bytes, std::uint64_t remote,
                          const ucp_rkey* key, const ucp_request_param_t& params) {
  ucs_status_t later = UCS_OK;
  ucs_status_t status = check(endpoint, call, &later);
  if (status == UCS_OK && later == UCS_OK && call == Call::kPut && key->is_gpu) {
    status = check(endpoint, Call::kPutGpu, &later);
  }
  if (status != UCS_OK) return pointer_of(status);
  ucp_context& context = *endpoint->worker->context;
  if (!context.may_write || !context.has_cards) return pointer_of(UCS_ERR_UNSUPPORTED);
  if (!lies_in_its_memory(local, num_bytes, params)) return pointer_of(UCS_ERR_INVALID_PARAM);
  if (num_bytes == 0) return pointer_of(UCS_OK);
  auto operation = std::make_shared<Operation>();
  operation->call = call;
  operation->local = local;
  operation->num_bytes = num_bytes;
  operation->remote = remote;
  operation->key = key->key;
  operation->region = key->region;
  const bool is_to_gpu = key->region != nullptr && key->region->type == UCS_MEMORY_TYPE_CUDA;
  operation->is_gpu = context.copies != nullptr && (is_gpu_memory(params) || is_to_gpu);
  if (call == Call::kPut && !operation->is_gpu && context.settings.steady == 0 && context.choose()) {
    operation->is_copied = true;
    operation->copied.assign(local, local + num_bytes);
  }
  // Half of the copied puts are complete at once.
  const bool is_complete = operation->is_copied && context.choose();
  Request* request = is_complete ? nullptr : new_request(params);
  operation->request = request;
  endpoint->end->begin(endpoint->shared_from_this(), std::move(operation), later);
  return begun(request);
}

}  // namespace

void drain(ucp_worker* worker) {
  std::vector<News> taken;
  worker->port->take(~std::size_t{0}, &taken);
  for (const News& news : taken) {
    if (news.request != nullptr) tell_owner(news.request, news.status);
  }
}

}  // namespace ferry::ucx_card

using ferry::ucx_card::Call;
using ferry::ucx_card::End;
using ferry::ucx_card::Operation;
using ferry::ucx_card::Request;

extern "C" {

ucs_status_ptr_t ucp_put_nbx(ucp_ep_h endpoint, const void* buffer, size_t count, uint64_t remote, ucp_rkey_h key,
                             const ucp_request_param_t* params) {
  auto* local = static_cast<std::byte*>(const_cast<void*>(buffer));
  return ferry::ucx_card::transfer(Call::kPut, endpoint, local, count, remote, key, *params);
}

ucs_status_ptr_t ucp_get_nbx(ucp_ep_h endpoint, void* buffer, size_t count, uint64_t remote, ucp_rkey_h key,
                             const ucp_request_param_t* params) {
  return ferry::ucx_card::transfer(Call::kGet, endpoint, static_cast<std::byte*>(buffer), count, remote, key, *params);
}

ucs_status_ptr_t ucp_am_send_nbx(ucp_ep_h endpoint, unsigned id, const void* header, size_t header_bytes,
                                 const void* buffer, size_t count, const ucp_request_param_t* params) {
  using ferry::ucx_card::pointer_of;
  ucs_status_t later = UCS_OK;
  if (const ucs_status_t status = ferry::ucx_card::check(endpoint, Call::kMessage, &later); status != UCS_OK) {
    return pointer_of(status);
  }
  auto operation = std::make_shared<Operation>();
  operation->call = Call::kMessage;
  operation->message_id = id;
  operation->header = static_cast<const std::byte*>(header);
  operation->header_bytes = header_bytes;
  operation->local = static_cast<std::byte*>(const_cast<void*>(buffer));
  operation->num_bytes = count;
  const bool steady = endpoint->worker->context->settings.steady != 0;
  operation->is_copied = steady || endpoint->worker->context->choose();
  if (operation->is_copied) {
    operation->copied.reserve(header_bytes + count);
    operation->copied.assign(operation->header, operation->header + header_bytes);
    operation->copied.insert(operation->copied.end(), operation->local, operation->local + count);
  }
  Request* request = operation->is_copied ? nullptr : ferry::ucx_card::new_request(*params);
  operation->request = request;
  endpoint->end->begin(endpoint->shared_from_this(), std::move(operation), later);
  return ferry::ucx_card::begun(request);
}

ucs_status_t ucp_worker_fence(ucp_worker_h worker) {
  if (const ucs_status_t status = worker->context->next(Call::kFence); status != UCS_OK) return status;
  std::vector<std::shared_ptr<ucp_ep>> endpoints;
  {
    const std::unique_lock lock = worker->port->end()->enter();
    for (const auto& endpoint : worker->endpoints) {
      if (endpoint->num_unfinished > 0) endpoints.push_back(endpoint);
    }
  }
  for (auto& endpoint : endpoints) {
    auto operation = std::make_shared<Operation>();
    operation->call = Call::kFence;
    End& end = *endpoint->end;
    end.begin(std::move(endpoint), std::move(operation), UCS_OK);
  }
  return UCS_OK;
}

ucs_status_ptr_t ucp_ep_flush_nbx(ucp_ep_h endpoint, const ucp_request_param_t* params) {
  using ferry::ucx_card::pointer_of;
  ucs_status_t later = UCS_OK;
  if (const ucs_status_t status = ferry::ucx_card::check(endpoint, Call::kFlush, &later); status != UCS_OK) {
    return pointer_of(status);
  }
  const bool may_be_done = endpoint->worker->context->settings.steady != 0 || endpoint->worker->context->choose();
  if (later == UCS_OK && endpoint->num_unfinished == 0 && may_be_done) {
    return pointer_of(UCS_OK);
  }
  auto operation = std::make_shared<Operation>();
  operation->call = Call::kFlush;
  Request* request = ferry::ucx_card::new_request(*params);
  operation->request = request;
  endpoint->end->begin(endpoint->shared_from_this(), std::move(operation), later);
  return request;
}

ucs_status_ptr_t ucp_ep_close_nbx(ucp_ep_h endpoint, const ucp_request_param_t* params) {
  const auto self = endpoint->shared_from_this();
  End& end = *self->end;
  const std::unique_lock lock = end.enter();
  ucp_worker* worker = endpoint->worker;
  worker->endpoints.erase(self);
  const ucs_status_t status = worker->context->next(Call::kClose);
  const bool is_slow = worker->context->settings.close_latency_ns > 0;
  const bool is_refused = status != UCS_OK && worker->context->settings.now != 0;
  if (is_refused || (status == UCS_OK && !is_slow && worker->context->choose())) {
    end.close(endpoint);
    return ferry::ucx_card::pointer_of(status);
  }
  auto operation = std::make_shared<Operation>();
  operation->call = Call::kClose;
  operation->status = status;
  Request* request = ferry::ucx_card::new_request(*params);
  operation->request = request;
  end.close(endpoint, operation);
  return request;
}

unsigned ucp_worker_progress(ucp_worker_h worker) {
  if (End& end = *worker->port->end(); !end.has_thread()) end.progress();
  if (!worker->port->has_news()) return 0;
  // Callbacks may call this again.
  std::vector<ferry::ucx_card::News> taken = std::move(worker->taken);
  worker->port->take(ferry::ucx_card::kMaxNews, &taken);
  for (const ferry::ucx_card::News& one : taken) ferry::ucx_card::tell_owner(worker, one);
  const auto num_taken = static_cast<unsigned>(taken.size());
  taken.clear();
  worker->taken = std::move(taken);
  return num_taken;
}

ucs_status_t ucp_worker_arm(ucp_worker_h worker) {
  // Without a thread nothing wakes the caller.
  return worker->port->end()->has_thread() && worker->port->arm() ? UCS_OK : UCS_ERR_BUSY;
}

ucs_status_t ucp_request_check_status(void* request) { return static_cast<Request*>(request)->status; }

void ucp_request_free(void* request) {
  auto* freed = static_cast<Request*>(request);
  if (freed->status == UCS_INPROGRESS || freed->in_callback) {
    freed->released = true;
  } else {
    delete freed;
  }
}

}  // extern "C"
