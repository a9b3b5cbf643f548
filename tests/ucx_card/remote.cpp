/// Memory of this process as cards reach it, and requests between cards of different processes.

#include <cstring>
#include <utility>

#include "ucx_card/card.hpp"

namespace ferry::ucx_card {
namespace {

/// Copies as cards do: each aligned word in one piece, seen by threads that read it meanwhile.
void copy_words(std::byte* to, const std::byte* from, std::size_t num_bytes) {
  constexpr std::size_t kWord = sizeof(std::uint64_t);
  const auto is_aligned = [](const std::byte* address) {
    return reinterpret_cast<std::uintptr_t>(address) % kWord == 0;
  };
  for (std::size_t at = 0; at < num_bytes;) {
    if (num_bytes - at >= kWord && is_aligned(to + at) && is_aligned(from + at)) {
      const std::uint64_t word = __atomic_load_n(reinterpret_cast<const std::uint64_t*>(from + at), __ATOMIC_RELAXED);
      __atomic_store_n(reinterpret_cast<std::uint64_t*>(to + at), word, __ATOMIC_RELAXED);
      at += kWord;
    } else {
      const unsigned char byte = __atomic_load_n(reinterpret_cast<const unsigned char*>(from + at), __ATOMIC_RELAXED);
      __atomic_store_n(reinterpret_cast<unsigned char*>(to + at), byte, __ATOMIC_RELAXED);
      ++at;
    }
  }
}

/// Null if the processor reaches the memory.
GpuCopies* copies_of(const ucp_mem& region) {
  return region.type == UCS_MEMORY_TYPE_CUDA ? region.context->copies.get() : nullptr;
}

/// For a card whose time is measured, as fast as the processor copies.
void copy(const ucp_mem& region, std::byte* to, const std::byte* from, std::size_t num_bytes) {
  if (region.context->settings.steady != 0) {
    std::memcpy(to, from, num_bytes);
  } else {
    copy_words(to, from, num_bytes);
  }
}

std::byte* address_of(const Range& range) {
  return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(range.remote)) + range.begin;
}

}  // namespace

bool Card::is_gpu_memory(const Operation& operation, bool local_is_gpu) const {
  if (local_is_gpu) return true;
  const auto found = memory.find(operation.key);
  return found != memory.end() && found->second->type == UCS_MEMORY_TYPE_CUDA;
}

/// Null if there is no such memory: a card then refuses the whole put or get.
ucp_mem* Card::memory_at(const Range& range, ucs_status_t* status) {
  const auto worker = workers.find(range.worker);
  *status = worker == workers.end() ? UCS_ERR_ENDPOINT_TIMEOUT : UCS_ERR_IO_ERROR;
  const auto found = memory.find(range.key);
  if (worker == workers.end() || found == memory.end()) return nullptr;
  ucp_mem* region = found->second;
  if (region->context != worker->second->context || !region->contains(range.remote, range.num_bytes)) return nullptr;
  *status = UCS_OK;
  return region;
}

ucs_status_t Card::read_memory(const Range& range, std::byte* into) {
  ucs_status_t status = UCS_OK;
  ucp_mem* region = memory_at(range, &status);
  if (region == nullptr) return status;
  // A read does not pass earlier writes on their way to the memory.
  for (const Unseen& unseen : std::exchange(region->unseen, {})) {
    copy_words(unseen.at, unseen.bytes.data(), unseen.bytes.size());
  }
  if (GpuCopies* copies = copies_of(*region)) return copies->copy(into, address_of(range), range.end - range.begin);
  copy(*region, into, address_of(range), range.end - range.begin);
  return UCS_OK;
}

ucs_status_t Card::write_memory(const Range& range, const std::byte* source) {
  ucs_status_t status = UCS_OK;
  ucp_mem* region = memory_at(range, &status);
  if (region == nullptr) return status;
  const std::size_t num_bytes = range.end - range.begin;
  if (GpuCopies* copies = copies_of(*region)) return copies->copy(address_of(range), source, num_bytes);
  if (region->type == UCS_MEMORY_TYPE_CUDA && region->context->settings.gpu_lag != 0) {
    region->unseen.push_back({address_of(range), {source, source + num_bytes}});
  } else {
    copy(*region, address_of(range), source, num_bytes);
  }
  return UCS_OK;
}

/// Sends a request, whose answer finishes a step of the operation.
void Card::ask(Frame frame, Wires::Payload payload, Asked asked) {
  frame.ticket = ++last_ticket_;
  frame.from = asked.endpoint->worker->id;
  if (wires_.send(asked.endpoint->process, frame, payload)) {
    asked_[frame.ticket] = std::move(asked);
  } else {
    fail(asked.endpoint.get(), UCS_ERR_ENDPOINT_TIMEOUT);
  }
}

void Card::receive(int wire, const Frame& frame, Wires::Payload payload) {
  const Range range{frame.worker, frame.key, frame.remote, frame.num_bytes, frame.begin, frame.end};
  Frame answer{.kind = FrameKind::kAnswer, .ticket = frame.ticket};
  switch (frame.kind) {
    case FrameKind::kWrite:
      answer.status = write_memory(range, payload.data());
      wires_.answer(wire, answer);
      break;
    case FrameKind::kRead: {
      std::vector<std::byte> bytes(range.end - range.begin);
      answer.status = read_memory(range, bytes.data());
      wires_.answer(wire, answer, bytes);
      break;
    }
    case FrameKind::kMessage:
      answer.status = take_message(frame, payload);
      wires_.answer(wire, answer);
      break;
    case FrameKind::kClosed:
      if (const auto worker = workers.find(frame.worker); worker != workers.end()) {
        fail_endpoints(*worker->second, frame.process, frame.from);
      }
      break;
    case FrameKind::kGone:
      for (const auto& [id, worker] : workers) fail_endpoints(*worker, frame.process, frame.from);
      break;
    case FrameKind::kAnswer:
      take_answer(frame, payload);
      break;
  }
}

ucs_status_t Card::take_message(const Frame& frame, Wires::Payload payload) {
  const auto worker = workers.find(frame.worker);
  if (worker == workers.end()) return UCS_ERR_ENDPOINT_TIMEOUT;
  auto message = std::make_shared<Operation>();
  message->call = Call::kMessage;
  message->header_bytes = frame.header_bytes;
  message->num_bytes = payload.size() - frame.header_bytes;
  message->copied.assign(payload.begin(), payload.end());
  tell(worker->second, {.message = message});
  return UCS_OK;
}

void Card::take_answer(const Frame& frame, Wires::Payload payload) {
  const auto found = asked_.find(frame.ticket);
  if (found == asked_.end()) return;
  const Asked asked = std::move(found->second);
  asked_.erase(found);
  ucp_ep* endpoint = asked.endpoint.get();
  // The owner of a closed endpoint may have given the memory away.
  if (endpoint->closed || endpoint->failure != UCS_OK) return;
  if (frame.status != UCS_OK) {
    fail(endpoint, frame.status);
    return;
  }
  copy_words(asked.operation->local + asked.begin, payload.data(), payload.size());
  finish_step(endpoint, asked.operation.get());
}

void Card::lose(std::uint64_t process) {
  for (const auto& [id, worker] : workers) fail_endpoints(*worker, process, kAnyWorker);
}

}  // namespace ferry::ucx_card
