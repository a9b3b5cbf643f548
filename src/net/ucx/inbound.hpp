#ifndef FERRY_NET_UCX_INBOUND_HPP
#define FERRY_NET_UCX_INBOUND_HPP

/// What one peer sends: checks each message, copies puts into this end's memory, and hands on the rest in the order in
/// which it was sent. UCX promises no order between messages that it sends in different ways (short or long), so they
/// are numbered, and a message is handed on only when all before it have arrived. Knows nothing of UCX.
///
/// Messages may arrive in two ways, each by a thread of its own. The bytes of mere puts are copied outside the lock:
/// that is why there are two.

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

/// The header, where these bytes can be one. Says nothing about who made it.
std::optional<Message> parse_message(std::span<const std::byte> header);

/// What a kSet, kAdd, kSwap, kPutSet or kPutAdd does to a word.
std::optional<AtomicOp> atomic_in(const Message& message);

/// By which worker a message came.
enum class Way { kWorker = 0, kReceiver = 1 };

class Inbound {
 public:
  /// Messages that may arrive before one that was sent earlier. UCX reorders only what is in flight at one moment, far
  /// fewer; but small messages may overtake many large puts that come in the other way.
  static constexpr std::size_t kMaxEarly = 1 << 20;
  /// With so many large puts a receiver waits for the rest: see is_ahead.
  static constexpr std::size_t kFarAhead = 1 << 15;

  struct Params {
    std::uint32_t sender = 0;
    std::uint32_t num_channels = 0;
    std::span<std::byte> memory{};  ///< what the sender puts into
  };
  Inbound(Seal seal, const Params& params) : params_(params), seal_(std::move(seal)) {}

  /// A message arrived. Those that the peer did not make, or that arrived before, are dropped without effect.
  /// @return false where it was dropped
  bool accept(const Message& message, std::span<const std::byte> payload, Way way = Way::kWorker) noexcept;

  /// The receiver has got far more than is possible unless something sent before it comes in the other way: it may
  /// wait, and the network keeps what is not taken. The engine's owner may not: it has to send, too.
  bool is_receiver_ahead() const {
    return num_early_puts_.load(std::memory_order_relaxed) >= kFarAhead && !broken() &&
           !has_ended_.load(std::memory_order_relaxed);
  }
  /// Nothing that is missing will come.
  void end() { has_ended_ = true; }

  /// Whether anything has.
  bool has_come(Way way) const { return has_come_[index_of(way)].load(std::memory_order_relaxed); }

  /// The peer was asked for bytes: the payloads of answers with this ticket go here.
  void expect(std::uint64_t ticket, std::span<std::byte> into);
  /// No more: what still comes is dropped.
  void forget(std::uint64_t ticket);
  void forget_gets();

  /// The messages other than mere puts that are due, in order, at most once each. Of the answers to a get the last.
  std::vector<Message> take_due();
  bool has_due() const { return has_due_.load(std::memory_order_seq_cst); }

  /// The peer broke the rules by a message that it did make, or there is no memory to keep one: nothing more arrives.
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
  std::uint64_t next_ = 0;                              // all messages before this number have arrived
  std::map<std::uint64_t, Early> early_;                // others that have
  std::map<std::uint64_t, std::span<std::byte>> gets_;  // destinations, by ticket
  std::vector<Message> due_;
  std::uint64_t num_dropped_ = 0;
  // Stored under the lock, read without it.
  std::atomic<bool> has_due_{false};
  std::atomic<bool> broken_{false};
  std::atomic<std::size_t> num_early_puts_{0};  // that came by the receiver
  std::atomic<bool> has_ended_{false};
  std::array<std::atomic<bool>, 2> has_come_{};
};

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_INBOUND_HPP
