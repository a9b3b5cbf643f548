#include "net/ucx/inbound.hpp"

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

bool Inbound::accept(const Message& message, std::span<const std::byte> payload) noexcept {
  const bool is_new = message.sequence >= next_ && !early_.contains(message.sequence);
  if (broken_ || !is_new || message.sender != params_.sender || message.payload_bytes != payload.size() ||
      !seal_.matches(message.sequence, message.sealed_bytes(), message.tag)) {
    return drop();
  }
  if (!is_sound(message, payload.size()) || early_.size() >= kMaxEarly) {
    broken_ = true;
    return drop();
  }
  if (!payload.empty()) std::memcpy(params_.memory.data() + message.value, payload.data(), payload.size());
  try {
    keep(message);
  } catch (const std::bad_alloc&) {
    broken_ = true;
  }
  return true;
}

void Inbound::keep(const Message& message) {
  if (message.sequence != next_) {
    early_.emplace(message.sequence, message);
    return;
  }
  hand_on(message);
  for (auto first = early_.begin(); first != early_.end() && first->first == next_; first = early_.erase(first)) {
    hand_on(first->second);
  }
}

bool Inbound::is_sound(const Message& message, std::size_t payload_bytes) const {
  if (message.channel >= params_.num_channels) return false;
  switch (message.kind) {
    case MessageKind::kPut:
      return payload_bytes > 0 && message.value <= params_.memory.size() &&
             payload_bytes <= params_.memory.size() - message.value;
    case MessageKind::kHello:
    case MessageKind::kNotify:
    case MessageKind::kGoodbye:
    case MessageKind::kFarewell:
    case MessageKind::kSocket:
    case MessageKind::kSettled:
      return payload_bytes == 0;
  }
  return false;
}

bool Inbound::drop() {
  ++num_dropped_;
  return false;
}

void Inbound::hand_on(const Message& message) {
  ++next_;
  if (message.kind != MessageKind::kPut) due_.push_back(message);
}

std::vector<Message> Inbound::take_due() { return std::exchange(due_, {}); }

}  // namespace ferry::net::ucx
