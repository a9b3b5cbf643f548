#ifndef FERRY_DEVICE_PROXY_RING_HPP
#define FERRY_DEVICE_PROXY_RING_HPP

/// Writers' end of a ring of requests (proxy_request.hpp). Nothing here waits. `Memory` is the access to words:
/// device::GpuMemory in kernels, threads of the host in tests.

#include "ferry/device/proxy_request.hpp"

namespace ferry::device {

template <typename Memory>
class RequestWriter {
 public:
  FERRY_DEVICE explicit RequestWriter(const RequestRing& ring) : ring_(ring) {}

  /// Takes the next ticket. The caller must write its request: the proxy takes requests in order.
  FERRY_DEVICE std::uint64_t take_ticket() const { return Memory::add_device(&ring_.state->head, 1); }

  /// Whether the ticket's slot is free. Reading the proxy's count goes over PCIe, so all writers share the last value
  /// read.
  FERRY_DEVICE bool has_room(std::uint64_t ticket) const {
    if (is_room(ticket, Memory::load_acquire_device(&ring_.state->known_consumed))) return true;
    const std::uint64_t consumed = Memory::load_acquire_system(&ring_.counts->consumed);
    if (!is_room(ticket, consumed)) return false;
    Memory::max_release_device(&ring_.state->known_consumed, consumed);
    return true;
  }

  /// Last value of the proxy's count that any writer has seen; slots of tickets that pass is_room with it are free.
  /// Relaxed: the caller issues a fence for the whole system before it writes such a slot.
  FERRY_DEVICE std::uint64_t known_consumed() const {
    return Memory::load_relaxed_device(&ring_.state->known_consumed);
  }
  FERRY_DEVICE bool is_room(std::uint64_t ticket, std::uint64_t consumed) const {
    return ticket < consumed + ring_.num_slots;
  }

  /// Writes word `idx` of a request whose slot is free. The memory that the request names was written before, with a
  /// fence for the whole system in between. Several threads may each write some of the words.
  FERRY_DEVICE void write_word(const Request& request, std::uint64_t ticket, std::uint32_t idx) const {
    Memory::store_relaxed_system(ring_.words + ticket % ring_.num_slots * kRequestWords + idx,
                                 request_word(request, ticket, idx) | lap_bit(ticket, ring_.num_slots));
  }
  /// Writes all words.
  FERRY_DEVICE void write(const Request& request, std::uint64_t ticket) const {
    const std::uint64_t lap = lap_bit(ticket, ring_.num_slots);
    std::uint64_t* const slot = ring_.words + ticket % ring_.num_slots * kRequestWords;
    for (std::uint32_t idx = 0; idx < kRequestWords; idx += 2) {
      Memory::store_pair_relaxed_system(slot + idx, request_word(request, ticket, idx) | lap,
                                        request_word(request, ticket, idx + 1) | lap);
    }
  }

  /// Number of tickets taken so far, including those of all requests that are ordered before this call.
  FERRY_DEVICE std::uint64_t head() const { return Memory::load_acquire_device(&ring_.state->head); }
  /// Number of complete requests; every ticket below it is complete.
  FERRY_DEVICE std::uint64_t completed() const { return Memory::load_acquire_system(&ring_.counts->completed); }
  /// Whether requests were lost with their peers since the last call of any thread.
  FERRY_DEVICE bool take_loss() const {
    const std::uint64_t lost = Memory::load_acquire_system(&ring_.counts->lost);
    return lost != 0 && Memory::swap_acquire_device(&ring_.state->known_lost, lost) != lost;
  }
  /// Whether the proxy takes no more requests; the host has the reason.
  FERRY_DEVICE bool has_failed() const { return Memory::load_acquire_system(&ring_.counts->failed) != 0; }

  /// Staging memory of the ticket's slot: its address for writers, and its offset in the network's memory.
  FERRY_DEVICE std::byte* staging(std::uint64_t ticket) const {
    return ring_.staging + ticket % ring_.num_slots * ring_.slot_bytes;
  }
  FERRY_DEVICE std::uint64_t staging_offset(std::uint64_t ticket) const {
    return ring_.staging_offset + ticket % ring_.num_slots * ring_.slot_bytes;
  }

  /// Index at which to look first for a reply's place, different for each caller.
  FERRY_DEVICE std::uint64_t next_place() const { return Memory::add_device(&ring_.state->reply_head, 1); }
  /// Takes the place at this index, modulo their number, if it is free. `reply` is then this caller's until give_reply,
  /// give_found_reply or leave_reply.
  FERRY_DEVICE bool try_take_reply(std::uint64_t place, std::uint64_t& reply) const {
    place %= kNumReplies;
    std::uint64_t* const turn = &ring_.state->reply_turns[place];
    const std::uint64_t seen = Memory::load_acquire_device(turn);
    std::uint64_t lap = seen >> reply_turn::kLap;
    if ((seen & reply_turn::kTaken) != 0) {
      const std::uint64_t earlier = lap * kNumReplies + place;
      std::uint64_t unread = 0;
      if ((seen & reply_turn::kLeft) == 0 || !(has_reply(earlier, unread) || is_over(earlier))) return false;
      ++lap;
    }
    reply = lap * kNumReplies + place;
    return Memory::compare_swap_device(turn, seen, lap << reply_turn::kLap | reply_turn::kTaken) == seen;
  }
  /// try_take_reply in one step, for the first place that a caller tries; it does not check whether the answer to a
  /// place that was left has arrived.
  FERRY_DEVICE bool try_take_free_reply(std::uint64_t place, std::uint64_t& reply) const {
    place %= kNumReplies;
    const std::uint64_t seen = Memory::or_acquire_device(&ring_.state->reply_turns[place], reply_turn::kTaken);
    reply = (seen >> reply_turn::kLap) * kNumReplies + place;
    return (seen & reply_turn::kTaken) == 0;
  }
  /// Frees a place whose reply was read or will never be written.
  FERRY_DEVICE void give_reply(std::uint64_t reply) const {
    Memory::store_release_device(&ring_.state->reply_turns[reply % kNumReplies], (reply / kNumReplies + 1)
                                                                                     << reply_turn::kLap);
  }
  /// give_reply for a reply that has_reply has found, and whose staging memory was not read: that look was an acquire,
  /// so it cannot see any effect of the next owner.
  FERRY_DEVICE void give_found_reply(std::uint64_t reply) const {
    Memory::store_relaxed_device(&ring_.state->reply_turns[reply % kNumReplies], (reply / kNumReplies + 1)
                                                                                     << reply_turn::kLap);
  }
  /// Abandons a reply that may still arrive: the place is free once it has, or once it is over.
  FERRY_DEVICE void leave_reply(std::uint64_t reply) const {
    Memory::store_release_device(&ring_.state->reply_turns[reply % kNumReplies],
                                 reply / kNumReplies << reply_turn::kLap | reply_turn::kTaken | reply_turn::kLeft);
  }
  /// Whether the reply has arrived, and its value if so.
  FERRY_DEVICE bool has_reply(std::uint64_t reply, std::uint64_t& value) const {
    const RequestReply& answer = ring_.replies[reply % kNumReplies];
    std::uint64_t low = 0;
    std::uint64_t high = 0;
    Memory::load_pair_acquire_system(answer.words, low, high);
    const std::uint64_t tag = reply_word(static_cast<std::uint32_t>(reply), 0) >> 32;
    if (low >> 32 != tag || high >> 32 != tag) return false;
    value = high << 32 | (low & 0xFFFFFFFFU);
    return true;
  }
  /// Whether the reply will never arrive, because the peer is lost.
  FERRY_DEVICE bool is_lost(std::uint64_t reply) const {
    return (loss_of(reply) & ~kStagingInUse) == reply_word(static_cast<std::uint32_t>(reply), 0) >> 32;
  }
  /// Whether it is lost and nothing writes its staging memory any more.
  FERRY_DEVICE bool is_over(std::uint64_t reply) const {
    return loss_of(reply) == reply_word(static_cast<std::uint32_t>(reply), 0) >> 32;
  }
  /// The staging memory of a reply.
  FERRY_DEVICE const std::byte* reply_staging(std::uint64_t reply) const {
    return ring_.staging + (ring_.num_slots + reply % kNumReplies) * ring_.slot_bytes;
  }
  FERRY_DEVICE std::uint64_t reply_staging_offset(std::uint64_t reply) const {
    return ring_.staging_offset + (ring_.num_slots + reply % kNumReplies) * ring_.slot_bytes;
  }

 private:
  FERRY_DEVICE std::uint64_t loss_of(std::uint64_t reply) const {
    return Memory::load_acquire_system(&ring_.replies[reply % kNumReplies].lost);
  }

  const RequestRing& ring_;
};

}  // namespace ferry::device

#endif  // FERRY_DEVICE_PROXY_RING_HPP
