#ifndef FERRY_NET_UCX_INBOUND_HPP
#define FERRY_NET_UCX_INBOUND_HPP

/// Messages from one peer: checks each, copies puts into this end's memory, and hands on the others in the order in
/// which they were sent. UCX guarantees no order between messages that it sends in different ways (short or long), so
/// they are numbered, and a message is handed on only after all earlier ones have arrived. Independent of UCX.
///
/// Messages may arrive in two ways, each on a thread of its own. The bytes of plain puts are copied outside the lock;
/// this is the purpose of the two threads.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "ferry/status.hpp"
#include "net/remote_words.hpp"
#include "net/ucx/message.hpp"

namespace ferry::net::ucx {

/// Parses the header; null if the bytes cannot be one. Does not check the sender.
std::optional<Message> parse_message(std::span<const std::byte> header);

/// Kinds of message that are atomics alone.
struct AtomicKind {
  MessageKind message;
  AtomicOp::Kind kind;
  std::size_t word_bytes;
};
inline constexpr std::array kAtomicKinds = {
    AtomicKind{MessageKind::kSet, AtomicOp::Kind::kSet, 8},
    AtomicKind{MessageKind::kAdd, AtomicOp::Kind::kAdd, 8},
    AtomicKind{MessageKind::kSwap, AtomicOp::Kind::kCompareSwap, 8},
    AtomicKind{MessageKind::kAnd, AtomicOp::Kind::kAnd, 8},
    AtomicKind{MessageKind::kOr, AtomicOp::Kind::kOr, 8},
    AtomicKind{MessageKind::kXor, AtomicOp::Kind::kXor, 8},
    AtomicKind{MessageKind::kSet32, AtomicOp::Kind::kSet, 4},
    AtomicKind{MessageKind::kAdd32, AtomicOp::Kind::kAdd, 4},
    AtomicKind{MessageKind::kSwap32, AtomicOp::Kind::kCompareSwap, 4},
    AtomicKind{MessageKind::kAnd32, AtomicOp::Kind::kAnd, 4},
    AtomicKind{MessageKind::kOr32, AtomicOp::Kind::kOr, 4},
    AtomicKind{MessageKind::kXor32, AtomicOp::Kind::kXor, 4},
};

/// Atomic of a message of such a kind, of a kPutSet or a kPutAdd; null for other kinds.
std::optional<AtomicOp> atomic_in(const Message& message);

/// Worker through which a message arrived.
enum class Way { kWorker = 0, kReceiver = 1 };

class Inbound {
 public:
  /// Limit of messages that arrive before an earlier one. UCX reorders only messages in flight at one moment, far
  /// fewer; but small messages may overtake many large puts that arrive through the receiver.
  static constexpr std::size_t kMaxEarly = 1 << 20;
  /// Number of early large puts at which the receiver waits for earlier messages: see is_receiver_ahead.
  static constexpr std::size_t kFarAhead = 1 << 15;

  struct Params {
    std::uint32_t sender = 0;
    std::uint32_t num_channels = 0;
    std::span<std::byte> memory{};  ///< memory that the sender puts into
  };
  Inbound(Seal seal, const Params& params) : params_(params), seal_(std::move(seal)) {}

  /// Takes a message that arrived. Messages that the peer did not make, or that arrived before, are dropped without
  /// effect.
  /// @return false if it was dropped
  bool accept(const Message& message, std::span<const std::byte> payload, Way way = Way::kWorker) noexcept;

  /// True if the receiver has far more early puts than are possible unless an earlier message is arriving through the
  /// worker. The receiver may wait then, because the network keeps unread messages. The engine's owner must not wait:
  /// it also has to send.
  bool is_receiver_ahead() const {
    return num_early_puts_.load(std::memory_order_relaxed) >= kFarAhead && !broken() &&
           !has_ended_.load(std::memory_order_relaxed);
  }
  /// No missing message will arrive any more.
  void end() { has_ended_ = true; }

  /// True if any message has arrived this way.
  bool has_come(Way way) const { return has_come_[index_of(way)].load(std::memory_order_relaxed); }

  /// This end asked the peer for bytes: payloads of answers with this ticket are copied to `into`.
  void expect(std::uint64_t ticket, std::span<std::byte> into);
  /// Ends expect(): answers that still arrive are dropped.
  void forget(std::uint64_t ticket);
  void forget_gets();

  /// Messages, other than plain puts, that are due, in order, each at most once. Contains only the last answer to a
  /// get.
  std::vector<Message> take_due();
  /// The same without an allocation: exchanges vectors.
  void take_due(std::vector<Message>* due);
  bool has_due() const { return has_due_.load(std::memory_order_seq_cst); }

  /// True if an authentic message of the peer broke the rules, or there was no memory to keep one: no further message
  /// is accepted.
  bool broken() const { return broken_.load(std::memory_order_seq_cst); }
  std::uint64_t num_dropped() const;

 private:
  struct Early {
    Message message;
    Way way = Way::kWorker;
  };

  static std::size_t index_of(Way way) { return static_cast<std::size_t>(way); }
  bool is_new(const Message& message) const { return message.sequence >= next_ && !early_.contains(message.sequence); }
  bool has_room_for(const Message& put, std::size_t payload_bytes) const;
  bool is_sound(const Message& message, std::size_t payload_bytes) const;
  void store(const Message& message, std::span<const std::byte> payload);
  bool drop();
  void keep(const Message& message, Way way);
  void hand_on(const Message& message);

  Params params_;
  mutable std::mutex mutex_;  // guards everything below
  Seal seal_;
  std::uint64_t next_ = 0;                              // all messages below this number have arrived
  std::map<std::uint64_t, Early> early_;                // messages above it that have arrived
  std::map<std::uint64_t, std::span<std::byte>> gets_;  // destinations, by ticket
  std::vector<Message> due_;
  std::uint64_t num_dropped_ = 0;
  // Stored under the lock, read without it.
  std::atomic<bool> has_due_{false};
  std::atomic<bool> broken_{false};
  std::atomic<std::size_t> num_early_puts_{0};  // arrived through the receiver
  std::atomic<bool> has_ended_{false};
  std::array<std::atomic<bool>, 2> has_come_{};
};

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_INBOUND_HPP
