#include "ucx_card/end.hpp"

#include <algorithm>
#include <utility>

#include "ucx_card/card.hpp"

namespace ferry::ucx_card {
namespace {

/// Maximum number of pieces of a put or get: enough for any order, few enough for tests with megabytes.
constexpr std::size_t kMaxPieces = 16;
/// Time without events after which a thread that spins sleeps: not all contexts of a process have traffic.
constexpr std::uint64_t kIdleNs = 1'000'000'000;
/// Copies take less, unless their GPU is broken or kernels wait for each other.
constexpr std::uint64_t kCopyPatienceNs = 10'000'000'000;

/// A mover (gpu_mover.hpp) takes more from the host's command to the first byte: two reads over PCIe. So a copy that
/// begins this long before its bytes arrive shows none of them early.
constexpr std::uint64_t kLeastMoveNs = 1'000;

/// Whether the peer has all puts of an endpoint before an operation.
bool is_in_place(const ucp_ep& endpoint, std::uint64_t before) {
  return std::all_of(endpoint.unfinished.begin(), endpoint.unfinished.lower_bound(before), [](const auto& entry) {
    return entry.second->call != Call::kPut || entry.second->num_unplaced == 0;
  });
}

/// Pieces end at multiples of 16 bytes in the peer's memory, as the packets of cards do.
std::size_t end_of_piece(const Operation& operation, std::size_t begin, std::size_t piece_bytes) {
  constexpr std::size_t kWord = 16;
  const std::size_t end = begin + piece_bytes;
  if (end >= operation.num_bytes) return operation.num_bytes;
  const std::size_t behind = (operation.remote + end) % kWord;
  return end - begin > behind ? end - behind : end;
}

}  // namespace

End::End(const ucp_context& context)
    : settings_(context.settings),
      spins_(context.settings.spin != 0),
      // Another sequence than that of the context, whose calls then make the same choices in every run.
      random_(~(context.settings.seed * 1000 + context.number)) {
  mutex_.set_spins(spins_);
  inbox_mutex_.set_spins(spins_);
}

void End::add(ucp_worker* worker) {
  workers_[worker->port->id()] = worker;
  if (has_thread() && !thread_.joinable()) thread_ = std::thread([this] { run(); });
}

void End::stop() {
  is_stopping_ = true;
  sleep_.wake();
  if (thread_.joinable()) thread_.join();
}

void End::clear() {
  const std::lock_guard lock(mutex_);
  events_.clear();
  const std::lock_guard inbox(inbox_mutex_);
  inbox_.clear();
}

std::unique_lock<CardMutex> End::enter() {
  std::unique_lock lock(mutex_);
  take_mail();
  return lock;
}

/// Leaves something for the thread to do.
void End::post(Mail mail) {
  {
    const std::lock_guard lock(inbox_mutex_);
    inbox_.push_back(std::move(mail));
    has_mail_ = true;
  }
  sleep_.wake();
}

void End::begin(std::shared_ptr<ucp_ep> endpoint, std::shared_ptr<Operation> operation, ucs_status_t later) {
  if (operation->call == Call::kPut || operation->call == Call::kGet) ++endpoint->num_unfinished;
  if (spins_ && has_thread()) {
    post({.reason = Reason::kBegin,
          .endpoint = std::move(endpoint),
          .operation = std::move(operation),
          .status = later});
  } else {
    const std::unique_lock lock = enter();
    start(endpoint, std::move(operation), later);
  }
}

void End::tell(const Departure& departure) { post({.reason = Reason::kDeparture, .departure = departure}); }

void End::take_mail() {
  if (!has_mail_.load(std::memory_order_acquire)) return;
  {
    const std::lock_guard lock(inbox_mutex_);
    taken_.swap(inbox_);
    has_mail_ = false;
  }
  for (Mail& mail : taken_) {
    switch (mail.reason) {
      case Reason::kBegin:
        start(mail.endpoint, std::move(mail.operation), mail.status);
        break;
      case Reason::kDeparture:
        fail_endpoints(mail.departure);
        break;
    }
  }
  taken_.clear();
}

void End::run() {
  std::unique_lock lock(mutex_);
  while (!is_stopping_) {
    take_mail();
    if (num_copying_ > 0) copies_->poll();
    if (!run_due()) wait(lock);
  }
}

void End::poll_copies() {
  const std::lock_guard lock(mutex_);
  if (copies_ != nullptr) copies_->poll();
}

void End::finish_copies() {
  const std::uint64_t deadline_ns = now_ns() + kCopyPatienceNs;
  for (; num_copying_ > 0 && now_ns() < deadline_ns; node::pause_core()) poll_copies();
}

/// Handles the first event. False if none is due.
bool End::run_due() {
  if (events_.empty() || events_.front().due_ns > now_ns()) return false;
  std::pop_heap(events_.begin(), events_.end());
  const Event event = std::move(events_.back());
  events_.pop_back();
  handle(event);
  return true;
}

void End::progress() {
  const bool is_copying = num_copying_.load(std::memory_order_relaxed) > 0;
  if (!is_copying && !has_mail_.load(std::memory_order_relaxed) &&
      next_due_ns_.load(std::memory_order_relaxed) == kNever) {
    return;
  }
  const std::unique_lock lock = enter();
  if (num_copying_ > 0) copies_->poll();
  while (run_due()) {
  }
  next_due_ns_ = events_.empty() ? kNever : events_.front().due_ns;
}

/// Waits for an event without the mutex.
void End::wait(std::unique_lock<CardMutex>& lock) {
  const std::uint64_t due_ns = events_.empty() ? kNever : events_.front().due_ns;
  next_due_ns_ = due_ns;
  lock.unlock();
  if (num_copying_ > 0) {
    // Only this thread sees them end.
    if (spins_) {
      node::pause_core();
    } else {
      std::this_thread::yield();
    }
    lock.lock();
    return;
  }
  const auto has_work = [this, due_ns] {
    return has_mail_.load(std::memory_order_relaxed) || is_stopping_.load(std::memory_order_relaxed) ||
           next_due_ns_.load(std::memory_order_relaxed) < due_ns;
  };
  bool sleeps = !spins_;
  if (spins_) {
    std::uint64_t now = now_ns();
    const std::uint64_t idle_from_ns = now + kIdleNs;
    for (; now < due_ns && !has_work(); now = now_ns()) {
      sleeps = due_ns == kNever && now > idle_from_ns;
      if (sleeps) break;
      node::pause_core();
    }
  }
  if (sleeps) {
    sleep_.until(due_ns,
                 [this, due_ns] { return has_mail_ || is_stopping_ || num_copying_ > 0 || next_due_ns_ < due_ns; });
  }
  lock.lock();
}

void End::schedule(Event event, std::uint64_t not_before_ns) {
  const bool steady = settings_.steady != 0;
  const std::uint64_t latency_ns = settings_.latency_ns;
  const std::uint64_t delay_ns =
      steady || latency_ns == 0 ? latency_ns : std::uniform_int_distribution<std::uint64_t>(0, latency_ns - 1)(random_);
  add(std::move(event), std::max(now_ns(), not_before_ns) + delay_ns);
}

void End::add(Event event, std::uint64_t due_ns) {
  event.due_ns = due_ns;
  event.order = settings_.steady != 0 ? ++num_scheduled_ : random_();
  const bool is_first = events_.empty() || events_.front() < event;
  if (is_first) next_due_ns_ = event.due_ns;
  events_.push_back(std::move(event));
  std::push_heap(events_.begin(), events_.end());
  if (is_first) sleep_.wake();
}

/// Time at which a put or get of this many bytes has passed the wires of both ends; messages pass between them. The
/// wire of an end in another process counts as free.
std::uint64_t End::reserve_wires(const ucp_ep& endpoint, const Operation& operation) {
  constexpr std::uint64_t kNsPerUs = 1000;
  if (settings_.rate == 0) return 0;
  Port& own = *endpoint.worker->port;
  Port* const peer = endpoint.peer.get();
  const bool is_get = operation.call == Call::kGet;
  Wire* const of_peer = peer == nullptr ? nullptr : is_get ? &peer->sends : &peer->receives;
  const std::uint64_t wire_ns = operation.num_bytes * kNsPerUs / settings_.rate;
  return Wire::carry(is_get ? own.receives : own.sends, of_peer, now_ns(), wire_ns);
}

/// Whether messages are in the peer's port from their calls on, which has them at their time: then they do not wait for
/// the next progress of this end, which may be busy with other messages as no card is.
bool End::sends_ahead(const ucp_ep& endpoint) const {
  return settings_.steady != 0 && endpoint.peer != nullptr && !endpoint.peer->end()->has_thread() &&
         endpoint.messages.empty();
}

void End::start(const std::shared_ptr<ucp_ep>& endpoint, std::shared_ptr<Operation> operation, ucs_status_t later) {
  if (endpoint->closed || endpoint->failure != UCS_OK) {
    // Since the call.
    if (operation->call == Call::kPut || operation->call == Call::kGet) --endpoint->num_unfinished;
    const ucs_status_t failure = endpoint->failure;
    if (!endpoint->closed) complete(endpoint.get(), operation.get(), failure);
    return;
  }
  operation->id = ++endpoint->num_operations;
  switch (operation->call) {
    case Call::kMessage:
      if (later == UCS_OK && sends_ahead(*endpoint)) {
        if (!endpoint->peer->tell({.message = std::move(operation), .due_ns = now_ns() + settings_.latency_ns})) {
          fail(endpoint.get(), UCS_ERR_ENDPOINT_TIMEOUT);
        }
        break;
      }
      operation->num_steps = 1;
      endpoint->messages.push_back(std::move(operation));
      schedule({.what = What::kMessage, .endpoint = endpoint});
      break;
    case Call::kFence:
      endpoint->fence = operation->id;
      break;
    case Call::kFlush:
      endpoint->flushes.push_back(std::move(operation));
      // If the link breaks, what has not arrived by now never does.
      if (later != UCS_OK) {
        fail(endpoint.get(), later);
        return;
      }
      check_flushes(endpoint.get());
      break;
    default:
      if (later != UCS_OK) ++operation->num_steps;  // ends by its failure alone, whatever arrives before
      start_transfer(endpoint, operation);
      break;
  }
  if (later != UCS_OK) fail_later(endpoint.get(), later);
}

void End::start_transfer(const std::shared_ptr<ucp_ep>& endpoint, const std::shared_ptr<Operation>& operation) {
  endpoint->unfinished[operation->id] = operation;
  operation->wire_ns = reserve_wires(*endpoint, *operation);
  operation->arrives_ns = std::max(now_ns(), operation->wire_ns) + settings_.latency_ns;
  // What the caller may reuse is complete for it before the bytes have arrived.
  if (operation->is_copied && operation->request != nullptr) {
    ++operation->num_steps;
    schedule({.what = What::kCompletion, .endpoint = endpoint, .operation = operation});
  }
  if (operation->call == Call::kPut && !is_in_place(*endpoint, endpoint->fence)) {
    if (start_word(endpoint, operation)) return;
    operation->behind = endpoint->fence;
    operation->num_unplaced = 1;
    ++operation->num_steps;  // until it starts: it may be complete for its caller before
    endpoint->held.push_back(operation);
  } else {
    start_pieces(endpoint, operation);
  }
}

void End::start_pieces(const std::shared_ptr<ucp_ep>& endpoint, const std::shared_ptr<Operation>& operation) {
  const std::size_t piece = std::max<std::size_t>({settings_.piece_bytes, operation->num_bytes / kMaxPieces, 1});
  const std::uint64_t late_ns = operation->call == Call::kPut ? settings_.write_latency_ns : 0;
  const bool steady = settings_.steady != 0;
  const bool was_held = operation->behind != 0;
  operation->num_unplaced = 1;  // until all have begun
  operation->is_moving = true;
  for (std::size_t begin = 0; begin < operation->num_bytes;) {
    ++operation->num_steps;
    ++operation->num_unplaced;
    const std::size_t end = end_of_piece(*operation, begin, piece);
    if (steady && was_held) {
      // It has travelled meanwhile.
      const std::uint64_t lead_ns = operation->is_gpu ? kLeastMoveNs : 0;
      operation->is_moving = false;
      add({.what = What::kPiece, .endpoint = endpoint, .operation = operation, .begin = begin, .end = end},
          operation->arrives_ns + late_ns - lead_ns);
      begin = end;
      continue;
    }
    const bool is_begun = steady && late_ns == 0 && start_copy(endpoint, operation, begin, end);
    if (!is_begun) {
      operation->is_moving = false;
      schedule({.what = What::kPiece, .endpoint = endpoint, .operation = operation, .begin = begin, .end = end},
               late_ns == 0 ? operation->wire_ns : std::max(operation->wire_ns, now_ns() + late_ns));
    }
    begin = end;
  }
  place(endpoint, operation.get());
}

void End::handle(const Event& event) {
  ucp_ep* endpoint = event.endpoint.get();
  if (event.what == What::kClosed) {
    // A worker that is destroyed has ended its closes.
    if (event.operation->request == nullptr) return;
    complete(endpoint, event.operation.get(), event.operation->status);
    endpoint->worker->closes.erase(event.operation);
    return;
  }
  if (endpoint->closed || endpoint->failure != UCS_OK) return;
  switch (event.what) {
    case What::kPiece:
      move(event.endpoint, event.operation, event.begin, event.end);
      break;
    case What::kArrived:
      if (event.status == UCS_OK) {
        finish_step(endpoint, event.operation.get());
      } else {
        fail(endpoint, event.status);
      }
      break;
    case What::kCompletion:
      complete(endpoint, event.operation.get(), UCS_OK);
      finish_step(endpoint, event.operation.get());
      break;
    case What::kMessage:
      deliver(event.endpoint);
      break;
    case What::kFlushed:
      complete(endpoint, event.operation.get(), UCS_OK);
      std::erase(endpoint->flushed, event.operation);
      break;
    case What::kFailure:
      fail(endpoint, event.status);
      break;
    case What::kClosed:
      break;
  }
}

/// Notes that a piece is in the peer's memory, and starts the puts that a fence has held for it.
void End::place(const std::shared_ptr<ucp_ep>& endpoint, Operation* operation) {
  if (--operation->num_unplaced > 0) return;
  while (!endpoint->held.empty() && is_in_place(*endpoint, endpoint->held.front()->behind)) {
    const std::shared_ptr<Operation> next = std::move(endpoint->held.front());
    endpoint->held.pop_front();
    start_pieces(endpoint, next);
    finish_step(endpoint.get(), next.get());
  }
}

void End::finish_step(ucp_ep* endpoint, Operation* operation) {
  if (--operation->num_steps > 0) return;
  complete(endpoint, operation, UCS_OK);
  if (endpoint->unfinished.erase(operation->id) > 0) --endpoint->num_unfinished;
  check_flushes(endpoint);
}

void End::check_flushes(ucp_ep* endpoint) {
  const std::uint64_t first = endpoint->unfinished.empty() ? ~std::uint64_t{0} : endpoint->unfinished.begin()->first;
  std::erase_if(endpoint->flushes, [&](const std::shared_ptr<Operation>& flush) {
    if (flush->id > first) return false;
    endpoint->flushed.push_back(flush);
    schedule({.what = What::kFlushed, .endpoint = endpoint->shared_from_this(), .operation = flush});
    return true;
  });
}

void End::complete(ucp_ep* endpoint, Operation* operation, ucs_status_t status) {
  if (operation->request == nullptr) return;
  endpoint->worker->port->tell({.request = std::exchange(operation->request, nullptr), .status = status});
}

void End::end_all(ucp_ep* endpoint, ucs_status_t status) {
  for (const auto& [id, operation] : endpoint->unfinished) complete(endpoint, operation.get(), status);
  for (const auto& flush : endpoint->flushes) complete(endpoint, flush.get(), status);
  for (const auto& flush : endpoint->flushed) complete(endpoint, flush.get(), status);
  endpoint->num_unfinished -= endpoint->unfinished.size();
  endpoint->unfinished.clear();
  endpoint->held.clear();
  endpoint->messages.clear();
  endpoint->flushes.clear();
  endpoint->flushed.clear();
}

/// Ends the endpoint's operations with the status, now.
void End::fail(ucp_ep* endpoint, ucs_status_t status) {
  if (endpoint->failure != UCS_OK || endpoint->closed) return;
  endpoint->failure = status;
  end_all(endpoint, status);
  endpoint->worker->port->tell({.failed = endpoint->shared_from_this(), .status = status});
}

void End::fail_later(ucp_ep* endpoint, ucs_status_t status) {
  schedule({.what = What::kFailure, .endpoint = endpoint->shared_from_this(), .status = status});
}

void End::fail_endpoints(const Departure& departure) {
  for (const auto& [id, worker] : workers_) {
    if (departure.worker != Departure::kAnyWorker && departure.worker != id) continue;
    for (const auto& endpoint : worker->endpoints) {
      const bool is_to_it = endpoint->process == departure.process &&
                            (departure.target == Departure::kAnyWorker || endpoint->target == departure.target);
      if (is_to_it) fail_later(endpoint.get(), UCS_ERR_CONNECTION_RESET);
    }
  }
}

void End::close(ucp_ep* endpoint, const std::shared_ptr<Operation>& operation) {
  if (operation != nullptr) {
    endpoint->worker->closes.insert(operation);
    schedule({.what = What::kClosed, .endpoint = endpoint->shared_from_this(), .operation = operation},
             now_ns() + settings_.close_latency_ns);
  }
  end_all(endpoint, UCS_ERR_CANCELED);
  endpoint->closed = true;
  Card& card = Card::instance();
  if (endpoint->process != card.process()) {
    card.send(endpoint->process,
              {.kind = FrameKind::kClosed, .from = endpoint->worker->port->id(), .worker = endpoint->target});
  } else if (endpoint->peer != nullptr) {
    endpoint->peer->end()->tell(
        {.worker = endpoint->target, .process = card.process(), .target = endpoint->worker->port->id()});
  }
}

}  // namespace ferry::ucx_card
