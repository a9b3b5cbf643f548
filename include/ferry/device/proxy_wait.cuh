#ifndef FERRY_DEVICE_PROXY_WAIT_CUH
#define FERRY_DEVICE_PROXY_WAIT_CUH

/// Requests of one kernel thread to the proxy, and the wait for an answer. The work of a call is in a few functions
/// that are not inlined: their waits take longer than a function call, and programs compile sooner. Each function reads
/// the ring's addresses once: they are in GPU memory, which would be read again after every look at a word, and that
/// time is part of every request and answer.
/// A ticket that was taken must be written, or the ring stops: if its slot does not become free before the deadline,
/// the ring stays broken.

#include "ferry/device/proxy_ring.hpp"
#include "ferry/device/scope.cuh"
#include "ferry/device/wait.cuh"

namespace ferry::device {

using GpuWriter = RequestWriter<GpuMemory>;

__device__ inline bool has_ring(const World& world) { return world.ring.num_slots != 0; }

/// Waits for the proxy. When a rank is lost, the proxy goes on serving the others and itself ends the requests to that
/// rank. One thread.
template <typename Ready>
__device__ inline Code wait_for_proxy(const World& world, Ready ready) {
  return wait_for(world, world.timeout_ns, ready, stop_word::kOver);
}

/// Waits until the slot of the ticket is free. One thread.
__device__ __noinline__ inline Code await_slot(const World& world, std::uint64_t ticket) {
  const GpuWriter writer(world.ring);
  bool failed = false;
  const Code code = wait_for_proxy(world, [&writer, &failed, ticket] {
    if (writer.has_room(ticket)) return true;
    failed = writer.has_failed();
    return failed;
  });
  if (code == Code::kOk && !failed) return Code::kOk;
  GpuMemory::store_release_device(&world.state->ring_broken, 1);
  GpuMemory::store_release_system(&world.ring.counts->broken, 1);  // the host reports the reason
  return code == Code::kOk ? Code::kTimeout : code;
}

/// Takes a ticket whose slot is free. `kFenced`: everything that the caller did before is ordered before its writes to
/// the slot. The loads and the ticket are one trip to memory: all are issued before any result is used. One thread.
template <bool kFenced>
__device__ inline Code take_slot(const World& world, const RequestRing& ring, std::uint64_t& ticket) {
  const GpuWriter writer(ring);
  const std::uint64_t broken = GpuMemory::load_relaxed_device(&world.state->ring_broken);
  bool is_free = false;
  if constexpr (kFenced) {
    const std::uint64_t known = writer.known_consumed();
    ticket = writer.take_ticket();
    GpuMemory::fence_system();
    is_free = writer.is_room(ticket, known);
  } else {
    ticket = writer.take_ticket();
    is_free = writer.has_room(ticket);
  }
  // The reader of a broken ring takes no further request, so it does not wait for this ticket.
  if (broken != 0) return Code::kTimeout;
  return is_free ? Code::kOk : await_slot(world, ticket);
}

/// Writes a request. One thread calls it: it wrote the memory that the request names, or has synchronised with the
/// writer since.
__device__ inline Code post_to(const World& world, const RequestRing& ring, const Request& request,
                               std::uint64_t& ticket) {
  if (const Code code = take_slot<true>(world, ring, ticket); code != Code::kOk) return code;
  GpuWriter(ring).write(request, ticket);
  return Code::kOk;
}

/// post_to as a function that is not inlined.
__device__ __noinline__ inline Code post(const World& world, const Request& request) {
  const RequestRing ring = world.ring;
  std::uint64_t ticket = 0;
  return post_to(world, ring, request, ticket);
}

/// Waits for the answer to `reply`. One thread.
__device__ inline Code await_reply(const World& world, const RequestRing& ring, std::uint64_t reply,
                                   std::uint64_t& value) {
  const GpuWriter writer(ring);
  constexpr unsigned kPollsPerLook = 32;  // a look is two more loads over PCIe, each as long as a poll
  unsigned num_polls = 0;
  bool lost = false;
  bool failed = false;
  const Code code = wait_for_proxy(world, [&] {
    if (writer.has_reply(reply, value)) return true;
    if (++num_polls % kPollsPerLook != 0) return false;
    lost = writer.is_lost(reply);
    failed = writer.has_failed();
    return lost || failed;
  });
  if (code != Code::kOk) return code;
  return lost ? Code::kPeerLost : failed ? Code::kTimeout : Code::kOk;
}

/// Takes a place for a reply. One thread.
__device__ inline Code take_reply(const World& world, const RequestRing& ring, std::uint64_t& reply) {
  const GpuWriter writer(ring);
  // Usually no other thread asks, and a counter that all share would be one more trip to memory.
  if (writer.try_take_free_reply(blockIdx.x + blockIdx.y + blockIdx.z + thread_of_block(), reply)) return Code::kOk;
  std::uint64_t place = writer.next_place();
  return wait_for_proxy(world, [&] { return writer.try_take_reply(place++, reply); });
}

/// Returns the place of a reply that was asked for and not found, or leaves it to the next thread that finds the answer
/// there. The place of a get that was lost under way is never used again: a network card may still write its staging
/// memory. One thread.
__device__ __noinline__ inline void give_up(const World& world, std::uint64_t reply) {
  const GpuWriter writer(world.ring);
  if (writer.is_over(reply)) {
    writer.give_reply(reply);
  } else {
    writer.leave_reply(reply);
  }
}

/// Asks for the answer to a reply that this thread has taken, and waits for it. After an error the thread no longer has
/// the place. One thread.
__device__ inline Code ask_and_await(const World& world, const RequestRing& ring, const Request& request,
                                     std::uint64_t reply, std::uint64_t& value) {
  std::uint64_t ticket = 0;
  Code code = post_to(world, ring, request, ticket);
  if (code != Code::kOk) {
    GpuWriter(ring).give_reply(reply);
    return code;
  }
  code = await_reply(world, ring, reply, value);
  if (code != Code::kOk) give_up(world, reply);
  return code;
}

/// Result of fetch_add and compare_swap.
struct Fetched {
  Code code = Code::kOk;
  std::uint64_t value = 0;  ///< the word before
};

/// `local_offset` of a get whose bytes are returned as the value, through the staging memory of its reply.
inline constexpr std::uint64_t kIntoReply = ~std::uint64_t{0};

/// Asks for a value and waits for it. The parameters are not passed as a Request, which would be in local memory, whose
/// stores the fence waits for. One thread.
__device__ __noinline__ inline Fetched fetch_by_request(const World& world, RequestOp op, std::uint32_t peer,
                                                        std::uint64_t remote_offset, std::uint64_t local_offset,
                                                        std::uint64_t num_bytes, std::uint64_t value,
                                                        std::uint64_t operand) {
  const RequestRing ring = world.ring;
  const GpuWriter writer(ring);
  Fetched fetched;
  std::uint64_t reply = 0;
  fetched.code = take_reply(world, ring, reply);
  if (fetched.code != Code::kOk) return fetched;
  const Request request{.op = op,
                        .peer = peer,
                        .wants_reply = true,
                        .reply = static_cast<std::uint32_t>(reply),
                        .local_offset = local_offset == kIntoReply ? writer.reply_staging_offset(reply) : local_offset,
                        .remote_offset = remote_offset,
                        .num_bytes = num_bytes,
                        .value = value,
                        .operand = operand};
  fetched.code = ask_and_await(world, ring, request, reply, fetched.value);
  if (fetched.code == Code::kOk) writer.give_found_reply(reply);
  return fetched;
}

}  // namespace ferry::device

#endif  // FERRY_DEVICE_PROXY_WAIT_CUH
