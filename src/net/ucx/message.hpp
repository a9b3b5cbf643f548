#ifndef FERRY_NET_UCX_MESSAGE_HPP
#define FERRY_NET_UCX_MESSAGE_HPP

/// Header of an active message. Only puts and answers to gets have a payload.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "net/ucx/seal.hpp"

namespace ferry::net::ucx {

enum class MessageKind : std::uint32_t {
  /// Sets up a connection, so that a peer's death is detected before the first put; answered by kReached with the same
  /// `value`: 1 if the hello went to the receiver. `operand`: 1 if the sender uses the receiver.
  kHello = 1,
  kNotify = 2,    ///< `value` on `channel`
  kPut = 3,       ///< the payload belongs at offset `value` of the receiver's memory
  kGoodbye = 4,   ///< the sender closes: it will put no more, and asks the receiver of this message to stop
  kFarewell = 5,  ///< answers a goodbye: none of the sender's puts is in flight, and no more will follow
  kSocket = 6,    ///< `value` names a socket with which the sender has connected to the receiver (net/ucx/ports.hpp)
  kSettled = 7,   ///< all such sockets have been named: the sender will not connect again
  // Atomics on the word of 8 bytes at offset `value` of the receiver's memory; answered if there is a ticket:
  kSet = 8,     ///< it becomes `operand`
  kAdd = 9,     ///< `operand` is added to it
  kSwap = 10,   ///< if it is `compare` it becomes `operand`
  kGet = 11,    ///< asks for the `operand` bytes at offset `value`
  kFlush = 12,  ///< asks for an answer once all messages before it have arrived
  /// Answers the request with `ticket`. For a get, the payload holds its bytes from `operand` on; for an atomic,
  /// `value` is the previous value of the word.
  kAnswer = 13,
  // kPut, and then kSet or kAdd on the word at offset `compare`:
  kPutSet = 14,
  kPutAdd = 15,
  kReached = 16,  ///< answers a hello
  // Atomics like kSet, kAdd and kSwap:
  kAnd = 17,
  kOr = 18,
  kXor = 19,
  // The same on words of 4 bytes, into which `operand` and `compare` fit:
  kSet32 = 20,
  kAdd32 = 21,
  kSwap32 = 22,
  kAnd32 = 23,
  kOr32 = 24,
  kXor32 = 25,
  kPutNotify = 26,  ///< kPut, and then kNotify of `operand`
};

inline constexpr std::uint32_t kMessageMagic = 0x4d'42'4e'46;  // "FNBM"
inline constexpr unsigned kMessageId = 0;

struct Message {
  std::uint32_t magic = kMessageMagic;
  MessageKind kind = MessageKind::kHello;
  std::uint32_t sender = 0;
  std::uint32_t channel = 0;
  std::uint64_t sequence = 0;  ///< number of the message among those from the sender to the receiver, from 0; unique
  std::uint64_t value = 0;
  std::uint64_t payload_bytes = 0;
  std::uint64_t ticket = 0;
  std::uint64_t operand = 0;
  std::uint64_t compare = 0;
  /// Covers all bytes before it, not the payload, whose tag would cost more than all other work (docs/transport.md).
  Tag tag{};

  bool has_put() const {
    return kind == MessageKind::kPut || kind == MessageKind::kPutSet || kind == MessageKind::kPutAdd ||
           kind == MessageKind::kPutNotify;
  }
  std::span<const std::byte> sealed_bytes() const {
    return std::as_bytes(std::span(this, 1)).first(sizeof(Message) - sizeof(Tag));
  }
};
static_assert(sizeof(Message) == 80, "peers read its bytes as they are in memory");
static_assert(std::endian::native == std::endian::little, "its byte order on the wire");

/// Maximum payload of a message, a whole chunk of a rail: together with UCX's headers and this one it fits into a
/// segment (kTcpSegment in resources.cpp), so the receiver need not join segments.
inline constexpr std::size_t kMaxPayloadBytes = std::size_t{128} << 10;

/// Maximum payload of a message in place of a card's write and its notify. UCX sends it eagerly, in at most three
/// segments of 8 KiB for InfiniBand, which the receiver copies: meant to take less than the two network latencies of a
/// write and its flush, and not run with a card. A call of latency mode for one token of 7168 bf16 channels fits.
inline constexpr std::size_t kMaxOneMessageBytes = std::size_t{20} << 10;

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_MESSAGE_HPP
