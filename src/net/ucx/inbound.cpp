#include "net/ucx/inbound.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace ferry::net::ucx {

std::optional<Message> parse_message(std::span<const std::byte> header) {
  Message message;
  if (header.size() != sizeof message) return std::nullopt;
  std::memcpy(&message, header.data(), sizeof message);
  if (message.magic != kMessageMagic) return std::nullopt;
  return message;
}

std::optional<AtomicOp> atomic_in(const Message& message) {
  if (message.kind == MessageKind::kPutSet || message.kind == MessageKind::kPutAdd) {
    const bool adds = message.kind == MessageKind::kPutAdd;
    return AtomicOp{.kind = adds ? AtomicOp::Kind::kAdd : AtomicOp::Kind::kSet,
                    .offset = message.compare,
                    .operand = message.operand};
  }
  const auto* const found = std::ranges::find(kAtomicKinds, message.kind, &AtomicKind::message);
  if (found == kAtomicKinds.end()) return std::nullopt;
  return AtomicOp{.kind = found->kind,
                  .word_bytes = found->word_bytes,
                  .offset = message.value,
                  .operand = message.operand,
                  .compare = message.compare};
}

bool Inbound::accept(const Message& message, std::span<const std::byte> payload, Way way) noexcept {
  std::unique_lock lock(mutex_);
  if (broken() || !is_new(message) || message.sender != params_.sender || message.payload_bytes != payload.size() ||
      !seal_.matches(message.sealed_bytes(), message.tag)) {
    return drop();
  }
  if (!is_sound(message, payload.size()) || early_.size() >= kMaxEarly) {
    broken_ = true;
    return drop();
  }
  if (message.kind == MessageKind::kPut) {
    lock.unlock();
    store(message, payload);
    lock.lock();
    // Another thread has received the same message meanwhile: one of the two is a replay.
    if (broken() || !is_new(message)) return drop();
  } else if (!payload.empty()) {
    store(message, payload);
  }
  try {
    keep(message, way);
  } catch (const std::bad_alloc&) {
    broken_ = true;
  }
  return true;
}

void Inbound::expect(std::uint64_t ticket, std::span<std::byte> into) {
  const std::lock_guard lock(mutex_);
  gets_[ticket] = into;
}

void Inbound::forget(std::uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  gets_.erase(ticket);
}

void Inbound::forget_gets() {
  const std::lock_guard lock(mutex_);
  gets_.clear();
}

std::uint64_t Inbound::num_dropped() const {
  const std::lock_guard lock(mutex_);
  return num_dropped_;
}

void Inbound::store(const Message& message, std::span<const std::byte> payload) {
  if (message.has_put()) {
    store_bytes(params_.memory.data() + message.value, payload.data(), payload.size());
  } else if (const auto found = gets_.find(message.ticket); found != gets_.end()) {
    store_bytes(found->second.data() + message.operand, payload.data(), payload.size());
  }
}

void Inbound::keep(const Message& message, Way way) {
  has_come_[index_of(way)] = true;
  if (message.sequence != next_) {
    early_.emplace(message.sequence, Early{message, way});
    if (way == Way::kReceiver) ++num_early_puts_;
    return;
  }
  hand_on(message);
  for (auto first = early_.begin(); first != early_.end() && first->first == next_; first = early_.erase(first)) {
    hand_on(first->second.message);
    if (first->second.way == Way::kReceiver) --num_early_puts_;
  }
}

bool Inbound::has_room_for(const Message& put, std::size_t payload_bytes) const {
  return payload_bytes > 0 && put.value <= params_.memory.size() && payload_bytes <= params_.memory.size() - put.value;
}

bool Inbound::is_sound(const Message& message, std::size_t payload_bytes) const {
  if (message.channel >= params_.num_channels) return false;
  switch (message.kind) {
    case MessageKind::kPut:
    case MessageKind::kPutNotify:
      return has_room_for(message, payload_bytes);
    case MessageKind::kPutSet:
    case MessageKind::kPutAdd:
      return has_room_for(message, payload_bytes) && ferry::net::is_sound(*atomic_in(message), params_.memory);
    case MessageKind::kHello:
    case MessageKind::kNotify:
    case MessageKind::kGoodbye:
    case MessageKind::kFarewell:
    case MessageKind::kSocket:
    case MessageKind::kSettled:
    case MessageKind::kFlush:
    case MessageKind::kReached:
      return payload_bytes == 0;
    case MessageKind::kSet:
    case MessageKind::kAdd:
    case MessageKind::kSwap:
    case MessageKind::kAnd:
    case MessageKind::kOr:
    case MessageKind::kXor:
    case MessageKind::kSet32:
    case MessageKind::kAdd32:
    case MessageKind::kSwap32:
    case MessageKind::kAnd32:
    case MessageKind::kOr32:
    case MessageKind::kXor32:
      return payload_bytes == 0 && ferry::net::is_sound(*atomic_in(message), params_.memory);
    case MessageKind::kGet:
      return payload_bytes == 0 && message.operand > 0 && message.value <= params_.memory.size() &&
             message.operand <= params_.memory.size() - message.value;
    case MessageKind::kAnswer: {
      const auto found = gets_.find(message.ticket);
      if (found == gets_.end()) return true;
      return payload_bytes > 0 && message.operand <= found->second.size() &&
             payload_bytes <= found->second.size() - message.operand;
    }
  }
  return false;
}

bool Inbound::drop() {
  ++num_dropped_;
  return false;
}

void Inbound::hand_on(const Message& message) {
  ++next_;
  if (message.kind == MessageKind::kPut) return;
  if (message.kind == MessageKind::kAnswer) {
    const auto found = gets_.find(message.ticket);
    // Only the answer with the last bytes of a get is reported: they are sent in order.
    if (message.payload_bytes > 0 &&
        (found == gets_.end() || message.operand + message.payload_bytes != found->second.size())) {
      return;
    }
    // The owner of the get may reuse its memory as soon as the end is reported.
    if (found != gets_.end()) gets_.erase(found);
  }
  due_.push_back(message);
  has_due_ = true;
}

void Inbound::take_due(std::vector<Message>* due) {
  due->clear();
  const std::lock_guard lock(mutex_);
  has_due_ = false;
  due_.swap(*due);
}

std::vector<Message> Inbound::take_due() {
  std::vector<Message> due;
  take_due(&due);
  return due;
}

}  // namespace ferry::net::ucx
