#ifndef FERRY_DEVICE_FAR_CALLS_CUH
#define FERRY_DEVICE_FAR_CALLS_CUH

/// Calls at ranks that this GPU does not reach itself: puts, gets, signals, atomics and quiet become requests to the
/// proxy. First the requests of one thread and its wait for an answer, then those of the members of a scope.
///
/// The work of a call is in a few functions that are not inlined: their waits take longer than a function call, and
/// programs compile sooner. Each function reads the ring's addresses once: they are in GPU memory, which would be read
/// again after every look at a word, and that time is part of every request and answer.
/// A ticket that was taken must be written, or the ring stops: if its slot does not become free before the deadline,
/// the ring stays broken.

#include "ferry/device/checks.cuh"
#include "ferry/device/copy.cuh"
#include "ferry/device/proxy_ring.hpp"
#include "ferry/device/scope.cuh"
#include "ferry/device/wait.cuh"
#include "ferry/one_sided.hpp"

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

/// Result of fetch_add, compare_swap, swap, fetch_and, fetch_or and fetch_xor.
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
                                                        std::uint64_t operand, bool is_narrow = false) {
  const RequestRing ring = world.ring;
  const GpuWriter writer(ring);
  Fetched fetched;
  std::uint64_t reply = 0;
  fetched.code = take_reply(world, ring, reply);
  if (fetched.code != Code::kOk) return fetched;
  const Request request{.op = op,
                        .peer = peer,
                        .wants_reply = true,
                        .is_narrow = is_narrow,
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

/// One chunk of a put, through the staging memory of its slot. All members of a thread or warp.
template <Scope kScope>
__device__ inline Code put_staged_chunk(const World& world, Request request, const std::byte* source) {
  static_assert(kScope != Scope::kBlock);
  const RequestRing ring = world.ring;
  const GpuWriter writer(ring);
  std::uint64_t ticket = 0;
  Code code = Code::kOk;
  if (is_leader<kScope>()) code = take_slot<false>(world, ring, ticket);
  code = Members<kScope>::agree(code);
  if (code != Code::kOk) return code;
  if constexpr (kScope == Scope::kWarp) ticket = __shfl_sync(kEveryLane, ticket, 0);
  copy_any<kScope, Source::kOwn>(writer.staging(ticket), source, request.num_bytes);
  request.local_offset = writer.staging_offset(ticket);
  Members<kScope>::meet();
  GpuMemory::fence_system();
  if constexpr (kScope == Scope::kWarp) {
    const unsigned lane = Members<kScope>::idx();
    if (lane < kRequestWords) writer.write_word(request, ticket, lane);
    __syncwarp();
  } else {
    writer.write(request, ticket);
  }
  return Code::kOk;
}

/// One chunk of a get, through the staging memory of its reply.
template <Scope kScope>
__device__ inline Code get_staged_chunk(const World& world, Request request, std::byte* dest) {
  static_assert(kScope != Scope::kBlock);
  const RequestRing ring = world.ring;
  const GpuWriter writer(ring);
  std::uint64_t reply = 0;
  Code code = Code::kOk;
  if (is_leader<kScope>()) {
    code = take_reply(world, ring, reply);
    request.wants_reply = true;
    request.reply = static_cast<std::uint32_t>(reply);
    request.local_offset = writer.reply_staging_offset(reply);
    std::uint64_t none = 0;
    if (code == Code::kOk) code = ask_and_await(world, ring, request, reply, none);
  }
  code = Members<kScope>::agree(code);
  if (code != Code::kOk) return code;
  if constexpr (kScope == Scope::kWarp) reply = __shfl_sync(kEveryLane, reply, 0);
  copy_any<kScope, Source::kShared>(dest, writer.reply_staging(reply), request.num_bytes);
  Members<kScope>::meet();
  if (is_leader<kScope>()) writer.give_reply(reply);
  return Code::kOk;
}

/// Calls `move(request, offset)` for each chunk of at most slot_bytes of a copy; a block's warps share the chunks. The
/// last chunk carries the signal of a put. All members.
template <Scope kScope, typename Move>
__device__ inline Code move_chunks(const World& world, const Request& whole, Move move) {
  const std::uint64_t chunk_bytes = world.ring.slot_bytes;
  std::uint64_t first = 0;
  std::uint64_t step = chunk_bytes;
  if constexpr (kScope == Scope::kBlock) {
    const unsigned num_warps = Members<kScope>::count() / kLanes;
    const unsigned warp = Members<kScope>::idx() / kLanes;
    if (warp >= num_warps) return Code::kOk;  // lanes of an incomplete warp
    first = warp * chunk_bytes;
    step = num_warps * chunk_bytes;
  }
  Code worst = Code::kOk;
  for (std::uint64_t at = first; at < whole.num_bytes && worst == Code::kOk; at += step) {
    Request part = whole;
    part.num_bytes = whole.num_bytes - at < chunk_bytes ? whole.num_bytes - at : chunk_bytes;
    part.remote_offset += at;
    if (has_signal(whole.op) && at + part.num_bytes != whole.num_bytes) part.op = RequestOp::kPut;
    worst = move(part, at);
  }
  return worst;
}

/// Whether the warps of the scope share chunks; otherwise its first thread moves them alone.
template <Scope kScope>
__device__ inline bool moves_by_warps() {
  return kScope == Scope::kWarp || (kScope == Scope::kBlock && Members<kScope>::count() >= kLanes);
}

/// Whether the request of the last chunk is behind those of all others.
template <Scope kScope>
__device__ inline bool moves_in_order(const World& world, std::uint64_t num_bytes) {
  return kScope != Scope::kBlock || Members<kScope>::count() < 2 * kLanes || num_bytes <= world.ring.slot_bytes;
}

template <Scope kScope>
__device__ __noinline__ inline Code put_staged(const World& world, const Request& whole, const std::byte* source) {
  Members<kScope>::meet();
  if (moves_by_warps<kScope>()) {
    return Members<kScope>::agree(
        move_chunks<kScope>(world, whole, [&world, source](const Request& part, std::uint64_t at) {
          return put_staged_chunk<Scope::kWarp>(world, part, source + at);
        }));
  }
  Code code = Code::kOk;
  if (is_leader<kScope>()) {
    code = move_chunks<Scope::kThread>(world, whole, [&world, source](const Request& part, std::uint64_t at) {
      return put_staged_chunk<Scope::kThread>(world, part, source + at);
    });
  }
  return Members<kScope>::agree(code);
}

template <Scope kScope>
__device__ __noinline__ inline Code get_staged(const World& world, const Request& whole, std::byte* dest) {
  Members<kScope>::meet();
  if (moves_by_warps<kScope>()) {
    return Members<kScope>::agree(
        move_chunks<kScope>(world, whole, [&world, dest](const Request& part, std::uint64_t at) {
          return get_staged_chunk<Scope::kWarp>(world, part, dest + at);
        }));
  }
  Code code = Code::kOk;
  if (is_leader<kScope>()) {
    code = move_chunks<Scope::kThread>(world, whole, [&world, dest](const Request& part, std::uint64_t at) {
      return get_staged_chunk<Scope::kThread>(world, part, dest + at);
    });
  }
  return Members<kScope>::agree(code);
}

/// A get small enough that the answer carries its bytes. All members.
template <Scope kScope>
__device__ inline Code get_by_answer(const World& world, const Request& request, std::byte* dest) {
  Members<kScope>::meet();
  Code code = Code::kOk;
  if (is_leader<kScope>()) {
    const Fetched got = fetch_by_request(world, RequestOp::kGet, request.peer, request.remote_offset, kIntoReply,
                                         request.num_bytes, 0, 0);
    code = got.code;
    if (code == Code::kOk) {
      copy_any<Scope::kThread, Source::kOwn>(dest, reinterpret_cast<const std::byte*>(&got.value), request.num_bytes);
    }
  }
  return Members<kScope>::agree(code);
}

namespace detail {

/// Asks the proxy, by one thread of the scope.
template <Scope kScope>
__device__ inline Code ask(const World& world, const Request& request) {
  Members<kScope>::meet();
  Code code = Code::kOk;
  if (is_leader<kScope>()) code = post(world, request);
  return Members<kScope>::agree(code);
}

/// A put to a rank of another node.
__device__ inline Request put_request(const World& world, int rank, const void* dest, std::uint64_t num_bytes) {
  Request request;
  request.op = RequestOp::kPut;
  request.peer = static_cast<std::uint32_t>(rank);
  request.remote_offset = offset_of(world, dest);
  request.num_bytes = num_bytes;
  return request;
}

/// A put to a rank of another node, and its signal.
__device__ inline Request put_signal_request(const World& world, int rank, const void* dest, std::uint64_t num_bytes,
                                             const std::uint64_t* word, std::uint64_t value, SignalOp op) {
  Request request = put_request(world, rank, dest, num_bytes);
  request.op = op == SignalOp::kSet ? RequestOp::kPutSignalSet : RequestOp::kPutSignalAdd;
  request.signal_offset = offset_of(world, word);
  request.value = value;
  return request;
}

/// A signal by the proxy, ordered after all earlier requests. One thread.
template <typename Word>
__device__ __noinline__ inline Code signal_by_request(const World& world, int rank, const Word* word, Word value,
                                                      SignalOp op) {
  Request request;
  request.op = op == SignalOp::kSet ? RequestOp::kSignalSet : RequestOp::kSignalAdd;
  request.peer = static_cast<std::uint32_t>(rank);
  request.is_narrow = sizeof(Word) == sizeof(std::uint32_t);
  request.remote_offset = offset_of(world, word);
  request.value = value;
  return post(world, request);
}

/// Moves the bytes of a put, which are one word, into its request.
__device__ inline void take_word(Request& put, std::uint64_t word) {
  if (has_signal(put.op)) {
    put.op = put.op == RequestOp::kPutSignalSet ? RequestOp::kPutValueSignalSet : RequestOp::kPutValueSignalAdd;
    put.operand = word;
  } else {
    put.op = RequestOp::kPutValue;
    put.value = word;
  }
}

/// Turns a put with a signal, whose bytes were requested separately, into the signal alone.
__device__ inline void keep_signal(Request& put, RequestOp op) {
  put.op = op == RequestOp::kPutSignalSet ? RequestOp::kSignalSet : RequestOp::kSignalAdd;
  put.remote_offset = put.signal_offset;
}

/// Requests a put_request or put_signal_request, from `source`. `direct`: the source may be read until a quiet.
template <Scope kScope>
__device__ __noinline__ inline Code put_by_request(const World& world, Request& put, const void* source, bool direct) {
  const auto addresses = reinterpret_cast<std::uintptr_t>(source) | put.remote_offset;
  if (put.num_bytes == sizeof(std::uint64_t) && addresses % sizeof(std::uint64_t) == 0) {
    Members<kScope>::meet();  // any member may have written it
    take_word(put, *static_cast<const std::uint64_t*>(source));
    return ask<kScope>(world, put);
  }
  if (direct && is_symmetric(world, source, put.num_bytes)) {
    put.local_offset = offset_of(world, source);
    return ask<kScope>(world, put);
  }
  const RequestOp op = put.op;
  const bool is_apart = has_signal(op) && !moves_in_order<kScope>(world, put.num_bytes);
  if (is_apart) put.op = RequestOp::kPut;
  Code code = put_staged<kScope>(world, put, static_cast<const std::byte*>(source));
  if (!is_apart || code != Code::kOk) return code;
  // All members have met: the leader's request follows those of all warps.
  keep_signal(put, op);
  if (is_leader<kScope>()) code = post(world, put);
  return Members<kScope>::agree(code);
}

/// A get from a rank of another node.
template <Scope kScope>
__device__ __noinline__ inline Code get_by_request(const World& world, int rank, void* dest, const void* source,
                                                   std::uint64_t num_bytes, bool now) {
  Request request;
  request.op = RequestOp::kGet;
  request.peer = static_cast<std::uint32_t>(rank);
  request.remote_offset = offset_of(world, source);
  request.num_bytes = num_bytes;
  if (!is_symmetric(world, dest, num_bytes)) {
    if (num_bytes <= kAnsweredBytes) return get_by_answer<kScope>(world, request, static_cast<std::byte*>(dest));
    return get_staged<kScope>(world, request, static_cast<std::byte*>(dest));
  }
  request.local_offset = offset_of(world, dest);
  if (!now) return ask<kScope>(world, request);
  Members<kScope>::meet();
  Code code = Code::kOk;
  if (is_leader<kScope>()) {
    code = fetch_by_request(world, RequestOp::kGet, request.peer, request.remote_offset, request.local_offset,
                            num_bytes, 0, 0)
               .code;
  }
  return Members<kScope>::agree(code);
}

/// Waits until the proxy has completed all earlier requests. One thread.
__device__ __noinline__ inline Code quiet_of_requests(const World& world) {
  Request request;
  request.op = RequestOp::kQuiet;
  std::uint64_t ticket = 0;
  const RequestRing ring = world.ring;
  if (const Code code = post_to(world, ring, request, ticket); code != Code::kOk) return code;
  const GpuWriter writer(ring);
  bool failed = false;
  const Code code = wait_for_proxy(world, [&] {
    if (writer.completed() > ticket) return true;
    failed = writer.has_failed();
    return failed;
  });
  if (code != Code::kOk) return code;
  return failed ? Code::kTimeout : writer.take_loss() ? Code::kPeerLost : Code::kOk;
}

/// Waits until the proxy has completed all earlier requests to this rank. One thread.
__device__ inline Code quiet_of_requests_to(const World& world, int rank) {
  return fetch_by_request(world, RequestOp::kQuietPeer, static_cast<std::uint32_t>(rank), 0, 0, 0, 0, 0).code;
}

}  // namespace detail

}  // namespace ferry::device

#endif  // FERRY_DEVICE_FAR_CALLS_CUH
