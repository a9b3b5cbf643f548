/// How the bytes of an end's operations get to their peers.

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "ucx_card/card.hpp"
#include "ucx_card/end.hpp"
#include "ucx_card/memory.hpp"

namespace ferry::ucx_card {
namespace {

Range range_of(const Operation& operation, std::size_t begin, std::size_t end) {
  return {operation.remote, operation.num_bytes, begin, end};
}

/// The GPU begins to copy by so much before the last byte is due that it arrives then, and no byte before its time on a
/// wire that is slower than the copy. Between two H200 a copy of 8 KiB takes 1.2 us and more, of 1 MiB 8.
constexpr std::uint64_t kCopyLeadNs = 300;
constexpr std::uint64_t kCopyRate = 150'000;  // bytes per microsecond

/// Copies that an operation needs; null if the processor reaches its memory.
GpuCopies* copies_of(const ucp_ep& endpoint, const Operation& operation) {
  return operation.is_gpu ? endpoint.worker->context->copies.get() : nullptr;
}

}  // namespace

/// Has the GPU move a piece, if it is of a put or get of this process from or to the memory of GPUs. It arrives once
/// both the copy and the wires are done; a copy takes longer than the latency where it is short, and not in addition.
bool End::start_copy(const std::shared_ptr<ucp_ep>& endpoint, const std::shared_ptr<Operation>& operation,
                     std::size_t begin, std::size_t end) {
  GpuCopies* const copies = copies_of(*endpoint, *operation);
  const Range range = range_of(*operation, begin, end);
  if (copies == nullptr || begin_use(endpoint->peer.get(), operation->region.get(), range) != UCS_OK) return false;
  ++num_copying_;
  sleep_.wake();  // the thread sees copies end
  std::byte* const local = operation->local + begin;
  const bool is_get = operation->call == Call::kGet;
  std::uint64_t at_ns = 0;
  if (settings_.on_time != 0 && settings_.steady != 0 && !is_get) {
    constexpr std::uint64_t kNsPerUs = 1000;
    const std::uint64_t later_bytes = operation->num_bytes - end;
    at_ns = operation->arrives_ns - (settings_.rate == 0 ? 0 : later_bytes * kNsPerUs / settings_.rate);
    at_ns -= std::min(at_ns, kCopyLeadNs + (end - begin) * kNsPerUs / kCopyRate);
  }
  copies->start(is_get ? local : range.address(), is_get ? range.address() : local, end - begin,
                when_copied(endpoint, operation), at_ns);
  return true;
}

GpuCopies::Done End::when_copied(const std::shared_ptr<ucp_ep>& endpoint, const std::shared_ptr<Operation>& operation) {
  return [this, endpoint, operation](ucs_status_t result) {
    operation->region->end_use();
    --num_copying_;
    if (endpoint->closed || endpoint->failure != UCS_OK) return;
    if (result == UCS_OK) place(endpoint, operation.get());
    Event event{.what = What::kArrived, .endpoint = endpoint, .operation = operation, .status = result};
    if (settings_.steady != 0) {
      add(std::move(event), std::max(now_ns(), operation->arrives_ns));
    } else {
      schedule(std::move(event), operation->wire_ns);
    }
  };
}

/// Has the GPU store a word behind the puts before it, if it copies them, so that no time is lost between the two: a
/// card only keeps their order.
bool End::start_word(const std::shared_ptr<ucp_ep>& endpoint, const std::shared_ptr<Operation>& operation) {
  GpuCopies* const copies = copies_of(*endpoint, *operation);
  std::uint64_t word = 0;
  const bool is_word = operation->num_bytes == sizeof word && operation->remote % sizeof word == 0;
  if (copies == nullptr || !is_word || settings_.steady == 0 || settings_.write_latency_ns > 0) return false;
  if (!endpoint->held.empty()) return false;
  for (const auto& [id, earlier] : endpoint->unfinished) {
    if (id >= endpoint->fence) break;
    if (earlier->call == Call::kPut && earlier->num_unplaced > 0 && !earlier->is_moving) return false;
  }
  const Range range = range_of(*operation, 0, sizeof word);
  if (begin_use(endpoint->peer.get(), operation->region.get(), range) != UCS_OK) return false;
  std::memcpy(&word, operation->local, sizeof word);
  operation->num_steps += 1;
  operation->num_unplaced = 1;
  operation->is_moving = true;
  ++num_copying_;
  if (copies->start_word(range.address(), word, operation->arrives_ns, when_copied(endpoint, operation))) {
    sleep_.wake();
    return true;
  }
  operation->num_steps -= 1;
  operation->is_moving = false;
  --num_copying_;
  operation->region->end_use();
  return false;
}

/// Moves a piece of a put or get.
void End::move(const std::shared_ptr<ucp_ep>& endpoint, const std::shared_ptr<Operation>& operation, std::size_t begin,
               std::size_t end) {
  if (start_copy(endpoint, operation, begin, end)) return;
  if (endpoint->process != Card::instance().process()) {
    ask(endpoint, operation, begin, end);
    return;
  }
  const std::byte* source = operation->is_copied ? operation->copied.data() : operation->local;
  const Range range = range_of(*operation, begin, end);
  const Port* const port = endpoint->peer.get();
  ucp_mem* const region = operation->region.get();
  const ucs_status_t moved = operation->call == Call::kGet ? read_memory(port, region, range, operation->local + begin)
                                                           : write_memory(port, region, range, source + begin);
  if (moved == UCS_OK) {
    place(endpoint, operation.get());
    finish_step(endpoint.get(), operation.get());
  } else {
    fail(endpoint.get(), moved);
  }
}

/// Has the card of another process move a piece.
void End::ask(const std::shared_ptr<ucp_ep>& endpoint, const std::shared_ptr<Operation>& operation, std::size_t begin,
              std::size_t end) {
  const bool is_get = operation->call == Call::kGet;
  Frame frame{.kind = is_get ? FrameKind::kRead : FrameKind::kWrite,
              .from = endpoint->worker->port->id(),
              .worker = endpoint->target,
              .key = operation->key,
              .remote = operation->remote,
              .num_bytes = operation->num_bytes,
              .begin = begin,
              .end = end};
  const std::byte* source = operation->is_copied ? operation->copied.data() : operation->local;
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
  if (!Card::instance().ask(frame, payload, {endpoint, operation, begin})) {
    fail(endpoint.get(), UCS_ERR_ENDPOINT_TIMEOUT);
  }
}

void End::take_answer(const std::shared_ptr<ucp_ep>& endpoint, Operation* operation, std::size_t begin,
                      ucs_status_t status, std::span<const std::byte> payload) {
  const std::unique_lock lock = enter();
  // The owner of a closed endpoint may have given the memory away.
  if (endpoint->closed || endpoint->failure != UCS_OK) return;
  if (status != UCS_OK) {
    fail(endpoint.get(), status);
    return;
  }
  copy_words(operation->local + begin, payload.data(), payload.size());
  if (operation->call == Call::kPut) place(endpoint, operation);
  finish_step(endpoint.get(), operation);
}

/// Delivers the first message on its way.
void End::deliver(const std::shared_ptr<ucp_ep>& endpoint) {
  const std::shared_ptr<Operation> message = std::move(endpoint->messages.front());
  endpoint->messages.pop_front();
  if (!message->is_copied) {
    message->copied.assign(message->header, message->header + message->header_bytes);
    message->copied.insert(message->copied.end(), message->local, message->local + message->num_bytes);
  }
  if (endpoint->process != Card::instance().process()) {
    const Frame frame{.kind = FrameKind::kMessage,
                      .from = endpoint->worker->port->id(),
                      .worker = endpoint->target,
                      .header_bytes = message->header_bytes};
    if (!Card::instance().ask(frame, message->copied, {endpoint, message, 0})) {
      fail(endpoint.get(), UCS_ERR_ENDPOINT_TIMEOUT);
    }
    return;
  }
  if (endpoint->peer != nullptr && endpoint->peer->tell({.message = message})) {
    finish_step(endpoint.get(), message.get());
  } else {
    fail(endpoint.get(), UCS_ERR_ENDPOINT_TIMEOUT);
  }
}

}  // namespace ferry::ucx_card
