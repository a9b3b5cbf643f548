#ifndef FERRY_NET_UCX_INBOUND_HPP
#define FERRY_NET_UCX_INBOUND_HPP

/// What one peer sends: checks each message, copies puts into this end's memory, and hands on the rest in the order in
/// which it was sent. UCX promises no order between messages that it sends in different ways (short or long), so they
/// are numbered, and a message is handed on only when all before it have arrived. Knows nothing of UCX.

#include <cstddef>
#include <cstdint>
#include <map>
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

class Inbound {
 public:
  /// Messages that may arrive before one that was sent earlier. UCX reorders only what is in flight at one moment, of
  /// which the sender's rings allow a few chunks per channel: far fewer.
  static constexpr std::size_t kMaxEarly = 1 << 16;

  struct Params {
    std::uint32_t sender = 0;
    std::uint32_t num_channels = 0;
    std::span<std::byte> memory{};  ///< what the sender puts into
  };
  Inbound(Seal seal, const Params& params) : seal_(std::move(seal)), params_(params) {}

  /// A message arrived. Those that the peer did not make, or that arrived before, are dropped without effect.
  /// @return false where it was dropped
  bool accept(const Message& message, std::span<const std::byte> payload) noexcept;

  /// The peer was asked for bytes: the payloads of answers with this ticket go here.
  void expect(std::uint64_t ticket, std::span<std::byte> into) { gets_[ticket] = into; }
  /// No more: what still comes is dropped.
  void forget(std::uint64_t ticket) { gets_.erase(ticket); }
  void forget_gets() { gets_.clear(); }

  /// The messages other than mere puts that are due, in order, at most once each. Of the answers to a get the last.
  std::vector<Message> take_due();
  bool has_due() const { return !due_.empty(); }

  /// The peer broke the rules by a message that it did make, or there is no memory to keep one: nothing more arrives.
  bool broken() const { return broken_; }
  std::uint64_t num_dropped() const { return num_dropped_; }

 private:
  bool has_room_for(const Message& put, std::size_t payload_bytes) const;
  bool is_sound(const Message& message, std::size_t payload_bytes) const;
  void store(const Message& message, std::span<const std::byte> payload);
  bool drop();
  void keep(const Message& message);
  void hand_on(const Message& message);

  Seal seal_;
  Params params_;
  std::uint64_t next_ = 0;                              // all messages before this number have arrived
  std::map<std::uint64_t, Message> early_;              // others that have
  std::map<std::uint64_t, std::span<std::byte>> gets_;  // destinations, by ticket
  std::vector<Message> due_;
  std::uint64_t num_dropped_ = 0;
  bool broken_ = false;
};

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_INBOUND_HPP
