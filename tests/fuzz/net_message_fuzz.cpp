/// Messages from one peer to the UCX engine (net/ucx/inbound.hpp): forged, changed, repeated, reordered, out of bounds.
///
/// Input: bytes of memory (u8), then messages to the end of the input, each with a mode (u8, modulo 3):
///   0  a header of any bytes, and a payload (u8 length)
///   1  a header that the peer sealed: kind, sender, channel, sequence (4 x u8), value (u16), ticket (u8, also the
///      operand of a comparison), operand (u8), announced payload (u8), payload (u8 length)
///   2  as 1, with one byte changed (u8 position, u8 bits)
/// Values with the highest bit set count from the end of the address space.

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <vector>

#include "fuzz_target.hpp"
#include "input_reader.hpp"
#include "net/ucx/inbound.hpp"
#include "net/ucx/seal.hpp"

namespace ferry::test {
namespace {

using namespace net::ucx;

constexpr std::uint32_t kSender = 1;
constexpr std::uint32_t kNumChannels = 3;
constexpr SealKey kKey{std::byte{7}};
constexpr int kNumModes = 3;
constexpr std::size_t kMaxMemory = 255;
/// The one get that this end has requested, and its length.
constexpr std::uint64_t kTicket = 5;
constexpr std::size_t kGetBytes = 20;

/// Expected state, computed independently of the receiver.
class Model {
 public:
  explicit Model(std::size_t memory_bytes) : memory(memory_bytes) {}

  bool broken = false;
  std::vector<std::byte> memory;
  std::vector<std::byte> got = std::vector<std::byte>(kGetBytes);
  std::set<std::uint64_t> arrived;
  std::vector<Message> notes;          // all arrived messages except puts and requested bytes
  std::set<std::uint64_t> last_parts;  // answers with the last part of those bytes

  bool accepts(const Message& message, std::span<const std::byte> payload) {
    if (broken || message.sender != kSender || arrived.contains(message.sequence) ||
        message.payload_bytes != payload.size()) {
      return false;
    }
    if (!is_possible(message, payload.size())) {
      broken = true;
      return false;
    }
    const auto kind = static_cast<std::uint32_t>(message.kind);
    const bool is_put_with_note = kind == 14 || kind == 15 || kind == 26;
    if (kind == 3 || is_put_with_note) {
      std::ranges::copy(payload, memory.begin() + static_cast<std::ptrdiff_t>(message.value));
      if (is_put_with_note) notes.push_back(message);
    } else if (message.kind == MessageKind::kAnswer && !payload.empty()) {
      if (message.ticket == kTicket && expects_bytes()) {
        std::ranges::copy(payload, got.begin() + static_cast<std::ptrdiff_t>(message.operand));
        if (message.operand + payload.size() == kGetBytes) last_parts.insert(message.sequence);
      }
    } else {
      notes.push_back(message);
    }
    arrived.insert(message.sequence);
    return true;
  }

  bool is_possible(const Message& message, std::size_t payload_bytes) const {
    if (message.channel >= kNumChannels) return false;
    const std::uint64_t size = memory.size();
    switch (static_cast<std::uint32_t>(message.kind)) {
      case 3:
      case 26:
        return is_put(message, payload_bytes);
      case 14:
      case 15:
        return is_put(message, payload_bytes) && message.compare % 8 == 0 && size >= 8 && message.compare <= size - 8;
      case 8:
      case 9:
      case 10:
      case 17:
      case 18:
      case 19:
        return payload_bytes == 0 && message.value % 8 == 0 && size >= 8 && message.value <= size - 8;
      case 20:
      case 21:
      case 22:
      case 23:
      case 24:
      case 25:
        return payload_bytes == 0 && message.value % 4 == 0 && size >= 4 && message.value <= size - 4 &&
               message.operand <= UINT32_MAX && message.compare <= UINT32_MAX;
      case 11:
        return payload_bytes == 0 && message.operand > 0 && message.operand <= size &&
               message.value <= size - message.operand;
      case 13:
        return message.ticket != kTicket || !expects_bytes() ||
               (payload_bytes > 0 && payload_bytes <= kGetBytes && message.operand <= kGetBytes - payload_bytes);
      case 1:
      case 2:
      case 4:
      case 5:
      case 6:
      case 7:
      case 12:
      case 16:
        return payload_bytes == 0;
      default:
        return false;
    }
  }

  bool is_put(const Message& message, std::size_t payload_bytes) const {
    return payload_bytes > 0 && payload_bytes <= memory.size() && message.value <= memory.size() - payload_bytes;
  }

  std::uint64_t first_missing() const {
    std::uint64_t missing = 0;
    while (arrived.contains(missing)) ++missing;
    return missing;
  }

  /// Returns true until the last part and all messages before it have arrived.
  bool expects_bytes() const { return last_parts.empty() || *last_parts.begin() >= first_missing(); }

  /// Sequence numbers of messages with none missing before them, in order.
  std::vector<std::uint64_t> due() const {
    const std::uint64_t missing = first_missing();
    std::vector<std::uint64_t> sequences;
    if (!expects_bytes()) sequences.push_back(*last_parts.begin());
    for (const Message& note : notes) {
      if (note.sequence < missing) sequences.push_back(note.sequence);
    }
    std::ranges::sort(sequences);
    return sequences;
  }
};

Message read_message(InputReader* reader) {
  Message message;
  message.kind = static_cast<MessageKind>(reader->take<std::uint8_t>());
  message.sender = reader->take<std::uint8_t>();
  message.channel = reader->take<std::uint8_t>();
  message.sequence = reader->take<std::uint8_t>();
  const auto value = reader->take<std::uint16_t>();
  message.value = (value & 0x8000) != 0 ? UINT64_MAX - (value & 0x7fff) : value;
  message.ticket = reader->take<std::uint8_t>();
  message.compare = message.ticket;
  message.operand = reader->take<std::uint8_t>();
  message.payload_bytes = reader->take<std::uint8_t>();
  if (message.kind >= MessageKind::kSet32 && message.ticket >= 0xF0) message.compare = UINT64_MAX - message.ticket;
  if (message.kind >= MessageKind::kSet32 && message.operand >= 0xF0) message.operand = UINT64_MAX - message.operand;
  return message;
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  InputReader reader(input);
  const std::size_t memory_bytes = reader.take<std::uint8_t>() % kMaxMemory;
  Model model(memory_bytes);
  std::vector<std::byte> memory(memory_bytes);
  std::vector<std::byte> got(kGetBytes);
  const Seal seal = Seal::make(kKey).value();
  Inbound inbound(Seal::make(kKey).value(), {kSender, kNumChannels, memory});
  inbound.expect(kTicket, got);
  std::vector<std::uint64_t> handed_on;
  while (!reader.empty()) {
    const int mode = reader.take<std::uint8_t>() % kNumModes;
    std::array<std::byte, sizeof(Message)> header{};
    std::optional<Message> sealed;
    bool genuine = false;
    if (mode == 0) {
      header = reader.take_array<sizeof(Message)>();
    } else {
      sealed = read_message(&reader);
      require(seal.tag(sealed->sealed_bytes(), &sealed->tag), "a message can be sealed");
      std::copy_n(reinterpret_cast<const std::byte*>(&*sealed), header.size(), header.begin());
      std::byte bits{0};
      if (mode == 2) {
        const std::size_t position = reader.take<std::uint8_t>() % header.size();
        bits = std::byte{reader.take<std::uint8_t>()};
        header[position] ^= bits;
      }
      genuine = bits == std::byte{0};
    }
    const std::span<const std::byte> taken = reader.take_at_most(reader.take<std::uint8_t>());
    const std::vector<std::byte> payload(taken.begin(), taken.end());  // the sanitizer detects an access beyond its end
    const std::optional<Message> message = parse_message(header);
    require(!genuine || message.has_value(), "a peer's message can be parsed");
    if (!message) continue;
    const bool expected = genuine && model.accepts(*message, payload);
    const Way way = message->sequence % 2 == 0 ? Way::kWorker : Way::kReceiver;
    require(inbound.accept(*message, payload, way) == expected, "only the peer's own messages are accepted, each once");
    require(inbound.broken() == model.broken, "only the peer itself can end the connection");
    require(same_bytes(memory, model.memory), "only payloads inside the memory are written");
    require(same_bytes(got, model.got), "only requested bytes are written to the get's destination");
    for (const Message& due : inbound.take_due()) handed_on.push_back(due.sequence);
    require(handed_on == model.due(), "messages are delivered in order, after all earlier ones");
  }
  for (std::size_t length = 0; length < sizeof(Message); ++length) {
    require(!parse_message(input.first(std::min(length, input.size()))), "a header has one length");
  }
}

}  // namespace ferry::test
