#ifndef FERRY_DEVICE_PROXY_REQUEST_HPP
#define FERRY_DEVICE_PROXY_REQUEST_HPP

/// Requests of a kernel to ranks that it cannot reach itself, and the words of the ring that carries them. Only for
/// device code written by hand; other programs call ferry/device/one_sided.cuh.
///
/// A ring is slots of kRequestWords words of 64 bits in pinned host memory. Writers take tickets, t = 0, 1, …, and
/// request t goes to slot t modulo the number of slots. The top bit of every word is the lap's: it flips each time
/// round, so each word shows whether it has arrived, in whatever order the words of a slot arrive, and no writer
/// publishes an end of the ring.
///
///   word                    writer                  reader         order
///   words of slot t         the writer of ticket t  proxy          relaxed, after a fence that covers the memory the
///                                                                  request names / acquire
///   counts.consumed         proxy                   writers        release / acquire: slots below it may be written
///                                                                  again, and the memory that they named has been read
///   counts.completed        proxy                   writers        release / acquire: requests below it are complete
///                                                                  at their targets; advances at a kQuiet
///   counts.lost             proxy                   writers        release / acquire: requests that will never be
///                                                                  complete, because their peer is lost
///   counts.failed           proxy, once             writers        release / acquire: no request is taken any more
///   counts.broken           writers                 proxy          release / acquire: a ticket was taken for a request
///                                                                  that will not be written
///   replies[r]              proxy                   requester      release / acquire, each word with its ticket
///   state.head              writers                 writers        relaxed add
///   state.known_consumed    writers                 writers        release maximum / acquire, or relaxed before a
///                                                                  fence: last seen value of `consumed`
///   state.known_lost        writers                 writers        acquire swap
///   state.reply_head        writers                 writers        relaxed add
///   state.reply_turns[r]    owner of the place:     next owner     acquire to take it, by exchange / release to give
///                           takes and gives back                   it back; relaxed if only the reply's words were
///                                                                  read there, by acquires

#include <cstddef>
#include <cstdint>

#include "ferry/device/host_device.hpp"

namespace ferry::device {

enum class RequestOp : std::uint8_t {
  kPut = 1,       ///< copy num_bytes from local_offset to remote_offset
  kPutValue,      ///< store the 8 bytes of `value` at remote_offset
  kSignalSet,     ///< the same, after all earlier requests to that peer have arrived
  kSignalAdd,     ///< add `value` to the word at remote_offset, after all earlier requests to that peer
  kPutSignalSet,  ///< kPut, then kSignalSet at signal_offset
  kPutSignalAdd,
  kPutValueSignalSet,  ///< kPutValue of `operand`, then kSignalSet of `value` at signal_offset
  kPutValueSignalAdd,
  kGet,          ///< copy num_bytes from the peer's remote_offset to local_offset; see kAnsweredBytes
  kFetchAdd,     ///< add `value` at remote_offset; the reply is the previous value
  kCompareSwap,  ///< store `value` at remote_offset if `operand` is there; the reply is the previous value
  kFence,        ///< later requests to this peer arrive after earlier ones
  kQuiet,        ///< complete earlier requests soon: a thread waits for it
  kSwap,         ///< store `value` at remote_offset; the reply is the previous value
  kFetchAnd,     ///< the same for its bitwise and with `value`
  kFetchOr,
  kFetchXor,
  kQuietPeer,  ///< kQuiet for earlier requests to `peer` alone; the reply says that they are complete
};
inline constexpr std::uint8_t kLastRequestOp = static_cast<std::uint8_t>(RequestOp::kQuietPeer);

/// Largest kGet to staging memory whose reply contains the bytes, the first byte lowest, so that the waiting thread
/// need not read the staging memory too.
inline constexpr std::uint64_t kAnsweredBytes = sizeof(std::uint64_t);

/// Whether the request is a put and its signal.
FERRY_HOST_DEVICE inline bool has_signal(RequestOp op) {
  return op >= RequestOp::kPutSignalSet && op <= RequestOp::kPutValueSignalAdd;
}

/// Whether the request changes a word alone, which may have 4 bytes. The changed word is at remote_offset.
FERRY_HOST_DEVICE inline bool is_atomic(RequestOp op) {
  return op == RequestOp::kSignalSet || op == RequestOp::kSignalAdd || op == RequestOp::kFetchAdd ||
         op == RequestOp::kCompareSwap || (op >= RequestOp::kSwap && op <= RequestOp::kFetchXor);
}

/// `peer` of a kFence for all ranks.
inline constexpr std::uint32_t kEveryPeer = 0xFFFF;

/// Offsets are in symmetric memory; local_offset may also be in the staging memory behind it.
struct Request {
  RequestOp op = RequestOp::kQuiet;
  std::uint32_t peer = 0;    ///< rank
  bool wants_reply = false;  ///< for kGet; kQuietPeer and atomics that return a value always get a reply
  bool is_narrow = false;    ///< the word of an is_atomic request has 4 bytes; value and operand fit into them
  std::uint32_t reply = 0;   ///< lower half of the reply's ticket
  std::uint64_t local_offset = 0;
  std::uint64_t remote_offset = 0;
  std::uint64_t num_bytes = 0;
  std::uint64_t value = 0;
  std::uint64_t operand = 0;
  std::uint64_t signal_offset = 0;
};

inline constexpr std::uint32_t kRequestWords = 8;
inline constexpr std::uint64_t kLapBit = std::uint64_t{1} << 63;

/// The lap bit of request `ticket`. Fresh memory is zero, so the first lap's is set.
FERRY_HOST_DEVICE inline std::uint64_t lap_bit(std::uint64_t ticket, std::uint64_t num_slots) {
  return ticket / num_slots % 2 == 0 ? kLapBit : 0;
}

namespace request_bits {
// Word 0: op, peer, the top bits of value and operand (their lower 63 bits are in words of their own), flags, and the
// reply.
inline constexpr unsigned kPeer = 8;
inline constexpr unsigned kValueTop = 24;
inline constexpr unsigned kOperandTop = 25;
inline constexpr unsigned kWantsReply = 26;
inline constexpr unsigned kNarrow = 27;
inline constexpr unsigned kReply = 28;
}  // namespace request_bits

/// Word `idx` of a request, without its lap bit.
FERRY_HOST_DEVICE inline std::uint64_t request_word(const Request& request, std::uint64_t ticket, std::uint32_t idx) {
  using namespace request_bits;
  constexpr std::uint64_t kRest = kLapBit - 1;
  switch (idx) {
    case 0:
      return std::uint64_t{static_cast<std::uint8_t>(request.op)} | std::uint64_t{request.peer & 0xFFFFU} << kPeer |
             request.value >> 63 << kValueTop | request.operand >> 63 << kOperandTop |
             std::uint64_t{request.wants_reply ? 1U : 0U} << kWantsReply |
             std::uint64_t{request.is_narrow ? 1U : 0U} << kNarrow | std::uint64_t{request.reply} << kReply;
    case 1:
      return request.local_offset & kRest;
    case 2:
      return request.remote_offset & kRest;
    case 3:
      return request.num_bytes & kRest;
    case 4:
      return request.value & kRest;
    case 5:
      return request.operand & kRest;
    case 6:
      return request.signal_offset & kRest;
    default:
      return ticket & kRest;  // shows the reader that the slot holds the request it expects
  }
}

/// Decodes the words of a slot, whatever they are. The caller compares the ticket.
inline Request request_of(const std::uint64_t (&words)[kRequestWords]) {
  using namespace request_bits;
  constexpr std::uint64_t kRest = kLapBit - 1;
  const std::uint64_t first = words[0];
  Request request;
  request.op = static_cast<RequestOp>(first & 0xFFU);
  request.peer = static_cast<std::uint32_t>(first >> kPeer & 0xFFFFU);
  request.wants_reply = (first >> kWantsReply & 1U) != 0;
  request.is_narrow = (first >> kNarrow & 1U) != 0;
  request.reply = static_cast<std::uint32_t>(first >> kReply & 0xFFFFFFFFU);
  request.local_offset = words[1] & kRest;
  request.remote_offset = words[2] & kRest;
  request.num_bytes = words[3] & kRest;
  request.value = (words[4] & kRest) | (first >> kValueTop & 1U) << 63;
  request.operand = (words[5] & kRest) | (first >> kOperandTop & 1U) << 63;
  request.signal_offset = words[6] & kRest;
  return request;
}

/// Written by the proxy except for the last word, in pinned host memory, initially zero. On separate cache lines:
/// writers poll them over PCIe.
struct alignas(128) RequestCounts {
  std::uint64_t consumed;
  std::uint64_t completed;
  std::uint64_t lost;
  std::uint64_t failed;
  alignas(128) std::uint64_t broken;
};

/// Answer to a kernel that asked for a value: two words, each with the lower half of the reply's ticket plus one in its
/// upper half, and one half of the value in its lower half. In pinned host memory, initially zero.
struct alignas(32) RequestReply {
  std::uint64_t words[2];
  /// Lower half of the ticket plus one if there will be no answer, because the peer is lost. With kStagingInUse while
  /// the network may still write the staging memory of the reply.
  std::uint64_t lost;
};

inline constexpr std::uint32_t kNumReplies = 256;
inline constexpr std::uint64_t kStagingInUse = std::uint64_t{1} << 32;

FERRY_HOST_DEVICE inline std::uint64_t reply_word(std::uint32_t reply, std::uint64_t half) {
  return std::uint64_t{reply + 1U} << 32 | (half & 0xFFFFFFFFU);
}

/// State of the writers alone, in their memory (a GPU's, for kernels), initially zero.
struct RequestRingState {
  std::uint64_t head;  ///< tickets taken
  std::uint64_t known_consumed;
  std::uint64_t known_lost;  ///< last seen value of `lost`
  std::uint64_t reply_head;
  std::uint64_t reply_turns[kNumReplies];  ///< see reply_turn
};

/// Word of a place for a reply: how often the place was used before, and whether it is in use.
namespace reply_turn {
inline constexpr std::uint64_t kTaken = 1;
inline constexpr std::uint64_t kLeft = 2;  ///< its owner no longer waits, and the answer is still outstanding
inline constexpr unsigned kLap = 2;        ///< the number of uses is above this bit
}  // namespace reply_turn

/// A ring as its writers see it.
struct RequestRing {
  std::uint64_t* words = nullptr;  ///< [num_slots][kRequestWords], initially zero
  std::uint64_t num_slots = 0;     ///< a power of two
  RequestCounts* counts = nullptr;
  RequestReply* replies = nullptr;  ///< [kNumReplies]
  RequestRingState* state = nullptr;
  /// Memory for bytes that the network cannot reach where they are: slot_bytes for each slot, then slot_bytes for each
  /// reply. Requests name it by offsets from staging_offset on.
  std::byte* staging = nullptr;
  std::uint64_t staging_offset = 0;
  std::uint64_t slot_bytes = 0;
};

}  // namespace ferry::device

#endif  // FERRY_DEVICE_PROXY_REQUEST_HPP
