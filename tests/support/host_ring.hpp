#ifndef FERRY_TESTS_HOST_RING_HPP
#define FERRY_TESTS_HOST_RING_HPP

/// A ring of requests (ferry/device/proxy_request.hpp) whose writers are host threads in place of GPU threads.

#include <array>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "ferry/device/proxy_ring.hpp"
#include "one_sided/request_reader.hpp"

namespace ferry::test {

struct HostMemory {
  using Word = std::atomic_ref<std::uint64_t>;
  static Word word(const std::uint64_t* address) { return Word(*const_cast<std::uint64_t*>(address)); }
  static std::uint64_t load_acquire_system(const std::uint64_t* address) {
    return word(address).load(std::memory_order_acquire);
  }
  static std::uint64_t load_acquire_device(const std::uint64_t* address) { return load_acquire_system(address); }
  static std::uint64_t load_relaxed_device(const std::uint64_t* address) {
    return word(address).load(std::memory_order_relaxed);
  }
  static void load_pair_acquire_system(const std::uint64_t* address, std::uint64_t& first, std::uint64_t& second) {
    first = load_acquire_system(address);
    second = load_acquire_system(address + 1);
  }
  /// Release, as the store follows a fence.
  static void store_relaxed_system(std::uint64_t* address, std::uint64_t value) {
    word(address).store(value, std::memory_order_release);
  }
  static void store_pair_relaxed_system(std::uint64_t* address, std::uint64_t first, std::uint64_t second) {
    store_relaxed_system(address, first);
    store_relaxed_system(address + 1, second);
  }
  static void store_relaxed_device(std::uint64_t* address, std::uint64_t value) {
    word(address).store(value, std::memory_order_relaxed);
  }
  static void store_release_device(std::uint64_t* address, std::uint64_t value) {
    word(address).store(value, std::memory_order_release);
  }
  static std::uint64_t add_device(std::uint64_t* address, std::uint64_t value) {
    return word(address).fetch_add(value, std::memory_order_relaxed);
  }
  static std::uint64_t or_acquire_device(std::uint64_t* address, std::uint64_t bits) {
    return word(address).fetch_or(bits, std::memory_order_acquire);
  }
  static std::uint64_t swap_acquire_device(std::uint64_t* address, std::uint64_t value) {
    return word(address).exchange(value, std::memory_order_acquire);
  }
  static std::uint64_t compare_swap_device(std::uint64_t* address, std::uint64_t expected, std::uint64_t desired) {
    word(address).compare_exchange_strong(expected, desired, std::memory_order_acq_rel);
    return expected;
  }
  static void max_release_device(std::uint64_t* address, std::uint64_t value) {
    std::uint64_t seen = word(address).load(std::memory_order_relaxed);
    while (seen < value && !word(address).compare_exchange_weak(seen, value, std::memory_order_release)) {
    }
  }
};

using HostWriter = device::RequestWriter<HostMemory>;

/// Memory of a ring. Staging memory begins at offset `heap_bytes` of the local bytes.
class HostRing {
 public:
  HostRing(std::uint64_t num_slots, std::uint64_t slot_bytes, std::uint64_t heap_bytes)
      : words_(num_slots * device::kRequestWords), staging_((num_slots + device::kNumReplies) * slot_bytes) {
    ring_.words = words_.data();
    ring_.num_slots = num_slots;
    ring_.counts = &counts_;
    ring_.replies = replies_.data();
    ring_.state = &state_;
    ring_.staging = staging_.data();
    ring_.staging_offset = heap_bytes;
    ring_.slot_bytes = slot_bytes;
  }
  HostRing(const HostRing&) = delete;
  HostRing& operator=(const HostRing&) = delete;

  const device::RequestRing& ring() const { return ring_; }
  HostWriter writer() const { return HostWriter(ring_); }
  one_sided::RequestRingMemory memory() {
    return {.words = words_.data(), .num_slots = ring_.num_slots, .counts = &counts_, .replies = replies_.data()};
  }
  std::byte* staging() { return staging_.data(); }
  std::uint64_t staging_bytes() const { return staging_.size(); }
  /// Restores the state of a new ring.
  void reset() {
    words_.assign(words_.size(), 0);
    counts_ = {};
    state_ = {};
  }

  /// Takes a ticket and waits until its slot is free.
  std::uint64_t take_slot() const {
    const std::uint64_t ticket = writer().take_ticket();
    while (!writer().has_room(ticket) && !writer().has_failed()) std::this_thread::yield();
    return ticket;
  }
  std::uint64_t post(const device::Request& request) const {
    const std::uint64_t ticket = take_slot();
    writer().write(request, ticket);
    return ticket;
  }
  /// Posts, and waits for the answer. Returns false if the peer is lost or the ring has failed.
  bool fetch(device::Request request, std::uint64_t& value) const {
    std::uint64_t reply = 0;
    for (std::uint64_t place = writer().next_place(); !writer().try_take_reply(place, reply); ++place) {
      std::this_thread::yield();
    }
    request.wants_reply = true;
    request.reply = static_cast<std::uint32_t>(reply);
    post(request);
    while (!writer().has_reply(reply, value)) {
      if (writer().is_lost(reply)) {
        writer().give_reply(reply);
        return false;
      }
      if (writer().has_failed()) return false;
      std::this_thread::yield();
    }
    writer().give_reply(reply);
    return true;
  }
  /// Returns false if the ring has failed.
  bool quiet() const {
    const std::uint64_t ticket = post({.op = device::RequestOp::kQuiet});
    while (writer().completed() <= ticket) {
      if (writer().has_failed()) return false;
      std::this_thread::yield();
    }
    return true;
  }

 private:
  std::vector<std::uint64_t> words_;
  std::vector<std::byte> staging_;
  device::RequestCounts counts_{};
  std::array<device::RequestReply, device::kNumReplies> replies_{};
  device::RequestRingState state_{};
  device::RequestRing ring_;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_HOST_RING_HPP
