#include "ucx_card/card.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

ucs_status_t ucp_context::next(ferry::ucx_card::Call call) {
  const auto index = static_cast<std::size_t>(call);
  const std::uint64_t number_of_call = ++num_calls[index];
  const bool is_this_end = settings.end == ferry::ucx_card::Settings::kEveryEnd || settings.end == number;
  if (!is_this_end || settings.fail != index || settings.fail_at != number_of_call) return UCS_OK;
  return static_cast<ucs_status_t>(-static_cast<int>(settings.status));
}

namespace ferry::ucx_card {
namespace {

/// Maximum number of pieces of a put or get: enough for any order, few enough for tests with megabytes.
constexpr std::size_t kMaxPieces = 16;
constexpr std::uint64_t kHandledPerLook = 16;
/// Time between two looks at the wires, for a thread that spins.
constexpr std::uint64_t kLookNs = 100'000;
constexpr std::uint64_t kNever = ~std::uint64_t{0};

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
          .count());
}

/// Pieces end at words of the peer's memory.
std::size_t end_of_piece(const Operation& operation, std::size_t begin, std::size_t piece_bytes) {
  constexpr std::size_t kWord = sizeof(std::uint64_t);
  const std::size_t end = begin + piece_bytes;
  if (end >= operation.num_bytes) return operation.num_bytes;
  const std::size_t behind = (operation.remote + end) % kWord;
  return end - begin > behind ? end - behind : end;
}

Range range_of(const ucp_ep& endpoint, const Operation& operation, std::size_t begin, std::size_t end) {
  return {endpoint.target, operation.key, operation.remote, operation.num_bytes, begin, end};
}

/// Copies that an operation needs; null if the processor reaches its memory.
GpuCopies* copies_of(const ucp_ep& endpoint, const Operation& operation) {
  return operation.is_gpu ? endpoint.worker->context->copies.get() : nullptr;
}

}  // namespace

Card& Card::instance() {
  static Card& card = *new Card;
  return card;
}

void Card::add_context(ucp_context* context) {
  const std::lock_guard life(life_mutex_);
  context->number = num_created_++;
  context->random.seed(context->settings.seed * 1000 + context->number);
  if (num_contexts_++ > 0) return;
  stopping_ = false;
  spins_ = context->settings.spin != 0;
  mutex.set_spins(spins_);
  copied_mutex_.set_spins(spins_);
  next_due_ns_ = kNever;
  {
    const std::lock_guard lock(mutex);
    wires_.open(
        {.received = [this](int wire, const Frame& frame, Wires::Payload payload) { receive(wire, frame, payload); },
         .lost = [this](std::uint64_t process) { lose(process); }});
  }
  thread_ = std::thread([this] { run(); });
}

void Card::remove_context(ucp_context* /*context*/) {
  const std::lock_guard life(life_mutex_);
  if (--num_contexts_ > 0) return;
  num_created_ = 0;
  {
    const std::lock_guard lock(mutex);
    stopping_ = true;
    wires_.wake();
  }
  thread_.join();
  const std::lock_guard lock(mutex);
  copied_.clear();
  has_copied_ = false;
  events_ = {};
  asked_.clear();
  wires_.close();
}

void Card::run() {
  std::unique_lock lock(mutex);
  while (!stopping_) {
    const std::uint64_t now = now_ns();
    if (spins_ && now >= next_look_ns_) look_at_wires(lock);
    if (has_copied_.load(std::memory_order_relaxed)) take_all_copied();
    if (!events_.empty() && events_.top().due_ns <= now) {
      run_due(lock);
    } else if (spins_) {
      spin(lock);
    } else if (events_.empty()) {
      wires_.wait(lock, std::nullopt);
    } else {
      wires_.wait(lock, std::chrono::nanoseconds(events_.top().due_ns - now));
    }
  }
}

void Card::run_due(std::unique_lock<CardMutex>& lock) {
  const Event event = events_.top();
  events_.pop();
  handle(event);
  // What other processes ask for is not kept waiting by what this one does.
  if (!spins_ && ++num_handled_ % kHandledPerLook == 0) wires_.wait(lock, std::chrono::nanoseconds(0));
}

/// Waits for an event without sleep, and without the mutex.
void Card::spin(std::unique_lock<CardMutex>& lock) {
  next_due_ns_ = events_.empty() ? kNever : events_.top().due_ns;
  lock.unlock();
  const auto waits = [this] {
    const std::uint64_t now = now_ns();
    return now < next_look_ns_ && now < next_due_ns_.load(std::memory_order_relaxed) &&
           !has_copied_.load(std::memory_order_relaxed);
  };
  while (waits()) node::pause_core();
  lock.lock();
}

void Card::look_at_wires(std::unique_lock<CardMutex>& lock) {
  next_look_ns_ = now_ns() + kLookNs;
  wires_.wait(lock, std::chrono::nanoseconds(0));
}

void Card::schedule(Event event, std::uint64_t not_before_ns) {
  ucp_context& context = *event.endpoint->worker->context;
  const std::uint64_t latency_ns = context.settings.latency_ns;
  const bool steady = context.settings.steady != 0;
  const std::uint64_t delay_ns = steady || latency_ns == 0 ? latency_ns : context.below(latency_ns);
  event.due_ns = std::max(now_ns(), not_before_ns) + delay_ns;
  event.order = steady ? ++num_scheduled_ : context.random();
  const bool is_first = events_.empty() || events_.top() < event;
  if (is_first) next_due_ns_ = event.due_ns;
  events_.push(std::move(event));
  if (is_first) wires_.wake();
}

/// Time at which a put or get of this many bytes has passed the wires of both ends, each of which carries one after the
/// other; messages pass between them. The wire of an end in another process counts as free.
std::uint64_t Card::reserve_wires(const ucp_ep& endpoint, std::size_t num_bytes) {
  constexpr std::uint64_t kNsPerUs = 1000;
  const std::uint64_t rate = endpoint.worker->context->settings.rate;
  if (rate == 0) return 0;
  std::uint64_t begin_ns = std::max(now_ns(), endpoint.worker->sends_until_ns);
  const auto peer = workers.find(endpoint.target);
  const bool is_here = endpoint.process == wires_.process() && peer != workers.end();
  if (is_here) begin_ns = std::max(begin_ns, peer->second->receives_until_ns);
  const std::uint64_t end_ns = begin_ns + num_bytes * kNsPerUs / rate;
  endpoint.worker->sends_until_ns = end_ns;
  if (is_here) peer->second->receives_until_ns = end_ns;
  return end_ns;
}

void Card::start_transfer(ucp_ep* endpoint, const std::shared_ptr<Operation>& operation) {
  const Settings& settings = endpoint->worker->context->settings;
  operation->id = ++endpoint->num_operations;
  endpoint->unfinished[operation->id] = operation;
  const std::size_t piece = std::max<std::size_t>({settings.piece_bytes, operation->num_bytes / kMaxPieces, 1});
  operation->wire_ns = reserve_wires(*endpoint, operation->num_bytes);
  const std::uint64_t late_ns = operation->call == Call::kPut ? settings.write_latency_ns : 0;
  const auto self = endpoint->shared_from_this();
  // What the caller may reuse is complete for it before the bytes have arrived.
  if (operation->is_copied && operation->request != nullptr) {
    ++operation->num_steps;
    schedule({.what = What::kCompletion, .endpoint = self, .operation = operation});
  }
  for (std::size_t begin = 0; begin < operation->num_bytes;) {
    ++operation->num_steps;
    const std::size_t end = end_of_piece(*operation, begin, piece);
    const bool is_begun = settings.steady != 0 && late_ns == 0 &&
                          start_copy(self, operation, range_of(*endpoint, *operation, begin, end));
    if (!is_begun) {
      schedule({.what = What::kPiece, .endpoint = self, .operation = operation, .begin = begin, .end = end},
               std::max(operation->wire_ns, now_ns() + late_ns));
    }
    begin = end;
  }
}

void Card::start_message(ucp_ep* endpoint, const std::shared_ptr<Operation>& operation) {
  operation->id = ++endpoint->num_operations;
  operation->num_steps = 1;
  endpoint->messages.push_back(operation);
  schedule({.what = What::kMessage, .endpoint = endpoint->shared_from_this()});
}

void Card::start_flush(ucp_ep* endpoint, const std::shared_ptr<Operation>& operation) {
  operation->id = ++endpoint->num_operations;
  endpoint->flushes.push_back(operation);
  check_flushes(endpoint);
}

void Card::handle(const Event& event) {
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
      deliver(endpoint);
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

/// Has the GPU move a piece, if it is of a put or get of this process from or to the memory of GPUs. It arrives
/// once both the copy and the wires are done.
bool Card::start_copy(const std::shared_ptr<ucp_ep>& endpoint, const std::shared_ptr<Operation>& operation,
                      const Range& range) {
  GpuCopies* const copies = copies_of(*endpoint, *operation);
  ucs_status_t status = UCS_OK;
  if (copies == nullptr || endpoint->process != wires_.process() || memory_at(range, &status) == nullptr) return false;
  auto* const remote = reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(range.remote)) + range.begin;
  std::byte* const local = operation->local + range.begin;
  const bool is_get = operation->call == Call::kGet;
  copies->start(is_get ? local : remote, is_get ? remote : local, range.end - range.begin,
                [this, arrived = Event{.what = What::kArrived, .endpoint = endpoint, .operation = operation}](
                    ucs_status_t result) mutable {
                  arrived.status = result;
                  if (spins_) {
                    const std::lock_guard lock(copied_mutex_);
                    copied_.push_back(std::move(arrived));
                    has_copied_ = true;
                  } else {
                    const std::lock_guard lock(mutex);
                    take_copied(std::move(arrived));
                  }
                });
  return true;
}

void Card::take_copied(Event arrived) {
  if (arrived.endpoint->closed || arrived.endpoint->failure != UCS_OK) return;
  const std::uint64_t wire_ns = arrived.operation->wire_ns;
  schedule(std::move(arrived), wire_ns);
}

void Card::take_all_copied() {
  std::vector<Event> all;
  {
    const std::lock_guard lock(copied_mutex_);
    all.swap(copied_);
    has_copied_ = false;
  }
  for (Event& arrived : all) take_copied(std::move(arrived));
}

/// Moves a piece of a put or get.
void Card::move(const std::shared_ptr<ucp_ep>& endpoint, const std::shared_ptr<Operation>& operation, std::size_t begin,
                std::size_t end) {
  const Range range = range_of(*endpoint, *operation, begin, end);
  if (start_copy(endpoint, operation, range)) return;
  const bool is_get = operation->call == Call::kGet;
  const std::byte* source = operation->is_copied ? operation->copied.data() : operation->local;
  if (endpoint->process != wires_.process()) {
    const Frame frame{.kind = is_get ? FrameKind::kRead : FrameKind::kWrite,
                      .worker = range.worker,
                      .key = range.key,
                      .remote = range.remote,
                      .num_bytes = range.num_bytes,
                      .begin = begin,
                      .end = end};
    std::vector<std::byte> read;
    if (GpuCopies* copies = copies_of(*endpoint, *operation); copies != nullptr && !is_get) {
      read.resize(end - begin);
      if (const ucs_status_t status = copies->copy(read.data(), source + begin, read.size()); status != UCS_OK) {
        fail(endpoint.get(), status);
        return;
      }
      source = read.data() - begin;
    }
    const auto payload = is_get ? Wires::Payload() : Wires::Payload(source + begin, source + end);
    ask(frame, payload, {endpoint, operation, begin});
    return;
  }
  const ucs_status_t moved =
      is_get ? read_memory(range, operation->local + begin) : write_memory(range, source + begin);
  if (moved == UCS_OK) {
    finish_step(endpoint.get(), operation.get());
  } else {
    fail(endpoint.get(), moved);
  }
}

/// Delivers the first message on its way.
void Card::deliver(ucp_ep* endpoint) {
  const std::shared_ptr<Operation> message = std::move(endpoint->messages.front());
  endpoint->messages.pop_front();
  if (!message->is_copied) {
    message->copied.assign(message->header, message->header + message->header_bytes);
    message->copied.insert(message->copied.end(), message->local, message->local + message->num_bytes);
  }
  if (endpoint->process != wires_.process()) {
    const Frame frame{.kind = FrameKind::kMessage, .worker = endpoint->target, .header_bytes = message->header_bytes};
    ask(frame, message->copied, {endpoint->shared_from_this(), message, 0});
  } else if (const auto worker = workers.find(endpoint->target); worker != workers.end()) {
    tell(worker->second, {.message = message});
    finish_step(endpoint, message.get());
  } else {
    fail(endpoint, UCS_ERR_ENDPOINT_TIMEOUT);
  }
}

void Card::finish_step(ucp_ep* endpoint, Operation* operation) {
  if (--operation->num_steps > 0) return;
  complete(endpoint, operation, UCS_OK);
  endpoint->unfinished.erase(operation->id);
  check_flushes(endpoint);
}

void Card::check_flushes(ucp_ep* endpoint) {
  const std::uint64_t first = endpoint->unfinished.empty() ? ~std::uint64_t{0} : endpoint->unfinished.begin()->first;
  std::erase_if(endpoint->flushes, [&](const std::shared_ptr<Operation>& flush) {
    if (flush->id > first) return false;
    endpoint->flushed.push_back(flush);
    schedule({.what = What::kFlushed, .endpoint = endpoint->shared_from_this(), .operation = flush});
    return true;
  });
}

void Card::complete(ucp_ep* endpoint, Operation* operation, ucs_status_t status) {
  if (operation->request == nullptr) return;
  tell(endpoint->worker, {.request = std::exchange(operation->request, nullptr), .status = status});
}

void Card::end_all(ucp_ep* endpoint, ucs_status_t status) {
  for (const auto& [id, operation] : endpoint->unfinished) complete(endpoint, operation.get(), status);
  for (const auto& flush : endpoint->flushes) complete(endpoint, flush.get(), status);
  for (const auto& flush : endpoint->flushed) complete(endpoint, flush.get(), status);
  endpoint->unfinished.clear();
  endpoint->messages.clear();
  endpoint->flushes.clear();
  endpoint->flushed.clear();
}

void Card::fail(ucp_ep* endpoint, ucs_status_t status) {
  if (endpoint->failure != UCS_OK || endpoint->closed) return;
  endpoint->failure = status;
  end_all(endpoint, status);
  tell(endpoint->worker, {.failed = endpoint->shared_from_this(), .status = status});
}

void Card::fail_later(ucp_ep* endpoint, ucs_status_t status) {
  schedule({.what = What::kFailure, .endpoint = endpoint->shared_from_this(), .status = status});
}

void Card::close(ucp_ep* endpoint, const std::shared_ptr<Operation>& operation) {
  if (operation != nullptr) {
    endpoint->worker->closes.insert(operation);
    schedule({.what = What::kClosed, .endpoint = endpoint->shared_from_this(), .operation = operation},
             now_ns() + endpoint->worker->context->settings.close_latency_ns);
  }
  end_all(endpoint, UCS_ERR_CANCELED);
  endpoint->closed = true;
  if (endpoint->process != wires_.process()) {
    (void)wires_.send(endpoint->process,
                      {.kind = FrameKind::kClosed, .from = endpoint->worker->id, .worker = endpoint->target});
  } else if (const auto peer = workers.find(endpoint->target); peer != workers.end()) {
    fail_endpoints(*peer->second, wires_.process(), endpoint->worker->id);
  }
}

void Card::connect(ucp_ep* endpoint) {
  const bool is_there =
      endpoint->process == wires_.process() ? workers.contains(endpoint->target) : wires_.connect(endpoint->process);
  if (!is_there) fail_later(endpoint, UCS_ERR_ENDPOINT_TIMEOUT);
}

void Card::remove(ucp_worker* worker) {
  workers.erase(worker->id);
  for (const auto& [id, other] : workers) fail_endpoints(*other, wires_.process(), worker->id);
  wires_.send_to_all({.kind = FrameKind::kGone, .from = worker->id});
}

void Card::fail_endpoints(const ucp_worker& of, std::uint64_t process, std::uint64_t target) {
  for (const auto& endpoint : of.endpoints) {
    const bool is_to_it = endpoint->process == process && (target == kAnyWorker || endpoint->target == target);
    if (is_to_it) fail_later(endpoint.get(), UCS_ERR_CONNECTION_RESET);
  }
}

void Card::tell(ucp_worker* worker, News news) {
  const std::lock_guard lock(worker->news_mutex);
  worker->news.push_back(std::move(news));
  worker->has_news = true;
  if (!std::exchange(worker->armed, false)) return;
  const std::uint64_t one = 1;
  (void)!::write(worker->event_fd, &one, sizeof one);
}

}  // namespace ferry::ucx_card
