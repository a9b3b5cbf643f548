#include "net/ucx/serve.hpp"

#include <algorithm>
#include <optional>

#include "net/ucx/inbound.hpp"

namespace ferry::net::ucx {

Message message_of(const AtomicOp& op) {
  const auto* const found = std::ranges::find_if(kAtomicKinds, [&op](const AtomicKind& known) {
    return known.kind == op.kind && known.word_bytes == op.word_bytes;
  });
  // Every sound operation has a kind. One that has none names no word, and the peer refuses it.
  return {.kind = found == kAtomicKinds.end() ? MessageKind{0} : found->message,
          .value = op.offset,
          .operand = op.operand,
          .compare = op.compare};
}

std::optional<Message> message_of_put(std::size_t remote_offset, const AtomicOp& op) {
  const bool is_signal = op.kind == AtomicOp::Kind::kSet || op.kind == AtomicOp::Kind::kAdd;
  if (!is_signal || op.word_bytes != sizeof(std::uint64_t)) return std::nullopt;
  return Message{.kind = op.kind == AtomicOp::Kind::kSet ? MessageKind::kPutSet : MessageKind::kPutAdd,
                 .value = remote_offset,
                 .operand = op.operand,
                 .compare = op.offset};
}

bool serve(const Message& message, std::span<std::byte> memory, const EngineEvents& events, Connection& connection) {
  Message answer{.kind = MessageKind::kAnswer, .ticket = message.ticket};
  if (const std::optional<AtomicOp> op = atomic_in(message); op) {
    answer.value = events.apply_atomic ? events.apply_atomic(*op) : apply_atomic(memory.data(), *op);
    if (events.changed) events.changed();
    if (message.ticket != kNoTicket) connection.answer(answer);
    return true;
  }
  if (message.kind == MessageKind::kFlush) {
    connection.answer(answer);
    return true;
  }
  if (message.kind != MessageKind::kGet) return false;
  const std::span<const std::byte> source = memory.subspan(message.value, message.operand);
  for (std::size_t done = 0; done < source.size(); done += kMaxPayloadBytes) {
    answer.operand = done;
    connection.answer(answer, source.subspan(done, std::min(kMaxPayloadBytes, source.size() - done)));
  }
  return true;
}

}  // namespace ferry::net::ucx
