#ifndef FERRY_DEVICE_ONE_SIDED_CUH
#define FERRY_DEVICE_ONE_SIDED_CUH

/// One-sided communication from inside kernels: what OneSided has for the host, with the same meaning of addresses and
/// of order. A kernel takes the World that OneSided::device_world returned, and the TeamViews of its barriers, by
/// value.
///
///     __global__ void hand_on(const __grid_constant__ ferry::device::World world, float* row, const float* mine,
///                             std::uint64_t* ready) {
///       using namespace ferry::device;
///       const int next = (world.rank + 1) % world.num_ranks;
///       put_signal<Scope::kBlock>(world, next, row, mine, kRowBytes, ready, 1, ferry::SignalOp::kSet);
///       if (wait_until<Scope::kBlock>(world, ready, ferry::Comparison::kEqual, 1) != Code::kOk) return;
///       use(row);
///     }
///
/// Scopes. A call is made by one thread, by all lanes of a warp, or by all threads of a block, with equal arguments,
/// and acts once for all of them. What any of them did before is before the call, and its result is the same for all.
///
/// Errors. Nothing traps and every wait has a deadline. What is not kOk is also in the error record, which
/// OneSided::poll_errors returns. A kernel that waits for others must leave them room on the GPU to run.
///
/// In a node the calls are loads, stores and atomics of the GPU. What is elsewhere the proxy does: calls ask it through
/// a ring. Nothing involves the program's host, so kernels that make calls may be captured in graphs.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ferry/device/block_word.cuh"
#include "ferry/device/checks.cuh"
#include "ferry/device/comparison.hpp"
#include "ferry/device/requests.cuh"
#include "ferry/one_sided.hpp"

namespace ferry::device {

/// What get_value found.
template <typename T>
struct Got {
  Code code = Code::kOk;
  T value{};
};

/// What fetch_add and compare_swap found.
struct Fetched {
  Code code = Code::kOk;
  std::uint64_t value = 0;  ///< the word before
};

namespace detail {

/// Whether a signal in this node is for this GPU to make, which never fails.
__device__ inline bool signals_by_gpu(const World& world, SignalOp op) {
  return world.gpu_words | (op == SignalOp::kSet);
}

/// Such a signal, after all that this thread did, or has met, before. One thread.
__device__ inline void signal_in_node(std::uint64_t* target, std::uint64_t value, SignalOp op) {
  if (op == SignalOp::kSet) {
    GpuMemory::store_release_system(target, value);
  } else {
    GpuMemory::add_release_system(target, value);
  }
}

/// A put that is not for this GPU to do, or is refused.
template <Scope kScope>
__device__ __noinline__ inline Code put_elsewhere(const World& world, int rank, void* dest, const void* source,
                                                  std::uint64_t num_bytes, bool direct) {
  const About about{Call::kPut, rank, dest, num_bytes};
  if (!is_rank(world, rank) || !is_symmetric(world, dest, num_bytes)) {
    return finish<kScope>(world, Code::kInvalidArgument, about);
  }
  if (num_bytes == 0) return Code::kOk;
  Request request = put_request(world, rank, dest, num_bytes);
  return finish<kScope>(world, put_by_request<kScope>(world, request, source, direct), about);
}

template <Scope kScope>
__device__ inline Code put(const World& world, int rank, void* dest, const void* source, std::uint64_t num_bytes,
                           bool direct) {
  if (!is_near(world, rank, dest, num_bytes)) {
    return put_elsewhere<kScope>(world, rank, dest, source, num_bytes, direct);
  }
  Members<kScope>::meet();
  copy_bytes<kScope, Source::kOwn>(at_peer(world, rank, dest), static_cast<const std::byte*>(source), num_bytes);
  Members<kScope>::meet();
  return Code::kOk;
}

/// Where the bytes or the signal are for the proxy, or something is refused.
template <Scope kScope>
__device__ __noinline__ inline Code put_signal_elsewhere(const World& world, int rank, void* dest, const void* source,
                                                         std::uint64_t num_bytes, std::uint64_t* word,
                                                         std::uint64_t value, SignalOp op, bool direct) {
  const About about{Call::kSignal, rank, word, sizeof(*word)};
  if (!is_rank(world, rank) || !is_word(world, word)) return finish<kScope>(world, Code::kInvalidArgument, about);
  if (num_bytes != 0 && !in_node(world, rank) && is_symmetric(world, dest, num_bytes)) {
    Request request = put_signal_request(world, rank, dest, num_bytes, word, value, op);
    return finish<kScope>(world, put_by_request<kScope>(world, request, source, direct), about);
  }
  if (num_bytes != 0) {
    if (const Code code = put<kScope>(world, rank, dest, source, num_bytes, direct); code != Code::kOk) return code;
  } else {
    Members<kScope>::meet();
  }
  // All members have met: the request of one covers what all have done.
  Code code = Code::kOk;
  if (is_leader<kScope>()) code = signal_by_request(world, rank, word, value, op);
  return finish<kScope>(world, Members<kScope>::agree(code), about);
}

template <Scope kScope>
__device__ inline Code put_signal(const World& world, int rank, void* dest, const void* source, std::uint64_t num_bytes,
                                  std::uint64_t* word, std::uint64_t value, SignalOp op, bool direct) {
  const bool is_word_here = is_near_word(world, rank, word);
  const bool by_gpu = signals_by_gpu(world, op);
  const bool is_dest_here = (num_bytes == 0) | is_near(world, rank, dest, num_bytes);
  const bool is_here = is_word_here & by_gpu & is_dest_here;
  if (!is_here) {
    return put_signal_elsewhere<kScope>(world, rank, dest, source, num_bytes, word, value, op, direct);
  }
  std::byte* const heap = heap_of(world, rank);
  Members<kScope>::meet();
  if (num_bytes != 0) {
    copy_bytes<kScope, Source::kOwn>(heap + offset_of(world, dest), static_cast<const std::byte*>(source), num_bytes);
    Members<kScope>::meet();
  }
  // All members have met: the release of one covers what all have done.
  if (is_leader<kScope>()) {
    signal_in_node(reinterpret_cast<std::uint64_t*>(heap + offset_of(world, word)), value, op);
  }
  Members<kScope>::meet();
  return Code::kOk;
}

/// A get that is not for this GPU to do, or is refused.
template <Scope kScope>
__device__ __noinline__ inline Code get_elsewhere(const World& world, int rank, void* dest, const void* source,
                                                  std::uint64_t num_bytes, bool now) {
  const About about{Call::kGet, rank, source, num_bytes};
  if (!is_rank(world, rank) || !is_symmetric(world, source, num_bytes)) {
    return finish<kScope>(world, Code::kInvalidArgument, about);
  }
  if (num_bytes == 0) return Code::kOk;
  return finish<kScope>(world, get_by_request<kScope>(world, rank, dest, source, num_bytes, now), about);
}

/// A get; `now`: the bytes are there when it returns.
template <Scope kScope>
__device__ inline Code get(const World& world, int rank, void* dest, const void* source, std::uint64_t num_bytes,
                           bool now) {
  if (!is_near(world, rank, source, num_bytes)) {
    return get_elsewhere<kScope>(world, rank, dest, source, num_bytes, now);
  }
  Members<kScope>::meet();
  copy_bytes<kScope, Source::kShared>(static_cast<std::byte*>(dest), at_peer(world, rank, source), num_bytes);
  Members<kScope>::meet();
  return Code::kOk;
}

/// put_value or get_value of a misaligned value. One thread.
__device__ inline Code refuse_value(const World& world, Call call, int rank, const void* data,
                                    std::uint64_t num_bytes) {
  return finish<Scope::kThread>(world, Code::kInvalidArgument, {call, rank, data, num_bytes});
}

/// fetch_add, and where `call` says so compare_swap of `operand`, where it is for the proxy or refused. One thread.
__device__ __noinline__ inline Fetched fetch_elsewhere(const World& world, Call call, int rank, std::uint64_t* word,
                                                       std::uint64_t value, std::uint64_t operand) {
  const About about{call, rank, word, sizeof(*word)};
  if (!is_rank(world, rank) || !is_word(world, word)) {
    return {finish<Scope::kThread>(world, Code::kInvalidArgument, about), 0};
  }
  Request request;
  request.op = call == Call::kFetchAdd ? RequestOp::kFetchAdd : RequestOp::kCompareSwap;
  request.peer = static_cast<std::uint32_t>(rank);
  request.remote_offset = offset_of(world, word);
  request.value = value;
  request.operand = operand;
  Fetched fetched;
  fetched.code = finish<Scope::kThread>(world, fetch_by_request(world, request, fetched.value), about);
  return fetched;
}

__device__ inline Fetched fetch(const World& world, Call call, int rank, std::uint64_t* word, std::uint64_t value,
                                std::uint64_t operand) {
  if (!(is_near_word(world, rank, word) & world.gpu_words)) {
    return fetch_elsewhere(world, call, rank, word, value, operand);
  }
  std::uint64_t* const target = word_at(world, rank, word);
  return {Code::kOk, call == Call::kFetchAdd ? GpuMemory::add_system(target, value)
                                             : GpuMemory::compare_swap_system(target, operand, value)};
}

/// Once for all members, who all get what it found.
template <Scope kScope>
__device__ inline Fetched fetch_once(const World& world, Call call, int rank, std::uint64_t* word, std::uint64_t value,
                                     std::uint64_t operand) {
  if constexpr (kScope == Scope::kThread) return fetch(world, call, rank, word, value, operand);
  Members<kScope>::meet();
  Fetched fetched;
  if (is_leader<kScope>()) {
    fetched = fetch(world, call, rank, word, value, operand);
    if constexpr (kScope == Scope::kBlock) block_word() = fetched.value;
  }
  fetched.code = Members<kScope>::agree(fetched.code);
  // Nobody writes the block's word again before all have read it and met, as the next call begins.
  fetched.value = kScope == Scope::kBlock ? block_word() : __shfl_sync(kEveryLane, fetched.value, 0);
  return fetched;
}

/// Looks at the word about as often as a message between GPUs takes, and no clock.
__device__ inline bool sees_soon(const std::uint64_t* word, Comparison comparison, std::uint64_t value) {
  constexpr unsigned kLooks = 64;
#pragma unroll 1
  for (unsigned look = 0; look < kLooks; ++look) {
    if (compares(GpuMemory::load_acquire_system(word), comparison, value)) return true;
  }
  return false;
}

/// The rest of a wait. `timeout_ns` 0: that of the OneSided. One thread.
__device__ __noinline__ inline Code wait_long(const World& world, const std::uint64_t* word, Comparison comparison,
                                              std::uint64_t value, std::uint64_t timeout_ns) {
  if (timeout_ns == 0) timeout_ns = world.timeout_ns;
  std::uint64_t seen = 0;
  const Code code = wait_for(world, timeout_ns, [&seen, word, comparison, value] {
    seen = GpuMemory::load_acquire_system(word);
    return compares(seen, comparison, value);
  });
  if (code == Code::kOk) return code;
  Failure failure = detail::failure(world, {Call::kWaitUntil, -1, word, sizeof(*word)});
  failure.comparison = static_cast<std::int32_t>(comparison);
  failure.seen = seen;
  failure.expected = value;
  failure.timeout_ns = timeout_ns;
  return fail(world, code, failure);
}

/// What the members have started is complete. `kTotal`: of ranks that do so and then read what the others wrote, at
/// least one sees it.
template <Scope kScope, bool kTotal>
__device__ inline Code complete(const World& world) {
  Members<kScope>::meet();
  Code code = Code::kOk;
  if (is_leader<kScope>()) {
    if constexpr (kTotal) {
      GpuMemory::fence_total_system();
    } else {
      GpuMemory::fence_system();
    }
    if (has_ring(world)) code = quiet_of_requests(world);
  }
  return finish<kScope>(world, Members<kScope>::agree(code), {Call::kQuiet, -1, world.heap, 0});
}

}  // namespace detail

/// Where `rank`'s memory at symmetric address `data` is for this GPU; null where it cannot reach it.
template <typename T>
__device__ inline T* peer_pointer(const World& world, int rank, T* data) {
  using namespace detail;
  if (!is_rank(world, rank) || !in_node(world, rank) || !is_symmetric(world, data, sizeof(T))) return nullptr;
  return reinterpret_cast<T*>(at_peer(world, rank, data));
}

/// OneSided::put. When it has returned `source` may be reused.
template <Scope kScope = Scope::kThread>
__device__ inline Code put(const World& world, int rank, void* dest, const void* source, std::uint64_t num_bytes) {
  return detail::put<kScope>(world, rank, dest, source, num_bytes, false);
}
/// `source` may be reused after a later `quiet`. Of symmetric memory no copy is made.
template <Scope kScope = Scope::kThread>
__device__ inline Code put_nbi(const World& world, int rank, void* dest, const void* source, std::uint64_t num_bytes) {
  return detail::put<kScope>(world, rank, dest, source, num_bytes, true);
}

/// OneSided::get. When it has returned the bytes are at `dest`, for the members of the scope.
template <Scope kScope = Scope::kThread>
__device__ inline Code get(const World& world, int rank, void* dest, const void* source, std::uint64_t num_bytes) {
  return detail::get<kScope>(world, rank, dest, source, num_bytes, true);
}
/// They are there after a later `quiet`. Where `dest` is not symmetric memory it waits like `get`.
template <Scope kScope = Scope::kThread>
__device__ inline Code get_nbi(const World& world, int rank, void* dest, const void* source, std::uint64_t num_bytes) {
  return detail::get<kScope>(world, rank, dest, source, num_bytes, false);
}

/// Puts one value of 4 or 8 bytes, in one piece, at an address that is a multiple of as many. One thread.
template <typename T>
__device__ inline Code put_value(const World& world, int rank, T* dest, std::type_identity_t<T> value) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  const bool is_whole = detail::is_aligned(world, dest);
  if (!(is_whole & detail::is_near(world, rank, dest, sizeof(T)))) {
    if (!is_whole) return detail::refuse_value(world, Call::kPut, rank, dest, sizeof(T));
    return detail::put_elsewhere<Scope::kThread>(world, rank, dest, &value, sizeof(T), false);
  }
  *reinterpret_cast<volatile T*>(detail::at_peer(world, rank, dest)) = value;
  return Code::kOk;
}
/// Gets one value of 4 or 8 bytes, in one piece, from an address that is a multiple of as many. One thread.
template <typename T>
__device__ inline Got<T> get_value(const World& world, int rank, const T* source) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  Got<T> got;
  const bool is_whole = detail::is_aligned(world, source);
  if (is_whole & detail::is_near(world, rank, source, sizeof(T))) {
    got.value = *reinterpret_cast<const volatile T*>(detail::at_peer(world, rank, source));
  } else if (!is_whole) {
    got.code = detail::refuse_value(world, Call::kGet, rank, source, sizeof(T));
  } else {
    got.code = detail::get_elsewhere<Scope::kThread>(world, rank, &got.value, source, sizeof(T), true);
  }
  return got;
}

/// OneSided::put_signal: whoever sees the signal by wait_until or test also sees the bytes.
template <Scope kScope = Scope::kThread>
__device__ inline Code put_signal(const World& world, int rank, void* dest, const void* source, std::uint64_t num_bytes,
                                  std::uint64_t* word, std::uint64_t value, SignalOp op) {
  return detail::put_signal<kScope>(world, rank, dest, source, num_bytes, word, value, op, false);
}
/// `source` may be reused after a later `quiet`.
template <Scope kScope = Scope::kThread>
__device__ inline Code put_signal_nbi(const World& world, int rank, void* dest, const void* source,
                                      std::uint64_t num_bytes, std::uint64_t* word, std::uint64_t value, SignalOp op) {
  return detail::put_signal<kScope>(world, rank, dest, source, num_bytes, word, value, op, true);
}

/// OneSided::signal. In a node, and after everything that the proxy was asked for, it is seen only after what its
/// members did before.
template <Scope kScope = Scope::kThread>
__device__ inline Code signal(const World& world, int rank, std::uint64_t* word, std::uint64_t value, SignalOp op) {
  return detail::put_signal<kScope>(world, rank, word, word, 0, word, value, op, false);
}

/// OneSided::fetch_add. Of a warp or a block once, and all threads get what it fetched: room for what each has, say.
/// At block scope it takes 8 bytes of the kernel's static shared memory, as compare_swap does.
template <Scope kScope = Scope::kThread>
__device__ inline Fetched fetch_add(const World& world, int rank, std::uint64_t* word, std::uint64_t value) {
  return detail::fetch_once<kScope>(world, Call::kFetchAdd, rank, word, value, 0);
}
/// OneSided::compare_swap. Of a warp or a block once, and all threads get what it fetched.
template <Scope kScope = Scope::kThread>
__device__ inline Fetched compare_swap(const World& world, int rank, std::uint64_t* word, std::uint64_t expected,
                                       std::uint64_t desired) {
  return detail::fetch_once<kScope>(world, Call::kCompareSwap, rank, word, desired, expected);
}

/// OneSided::test.
__device__ inline bool test(const std::uint64_t* word, Comparison comparison, std::uint64_t value) {
  return compares(GpuMemory::load_acquire_system(word), comparison, value);
}

/// OneSided::wait_until. `timeout_ns` 0: that of the OneSided.
template <Scope kScope = Scope::kThread>
__device__ inline Code wait_until(const World& world, const std::uint64_t* word, Comparison comparison,
                                  std::uint64_t value, std::uint64_t timeout_ns = 0) {
  if (!detail::is_word(world, word)) {
    return detail::finish<kScope>(world, Code::kInvalidArgument, {Call::kWaitUntil, -1, word, sizeof(*word)});
  }
  Members<kScope>::meet();
  Code code = Code::kOk;
  if (is_leader<kScope>() && !detail::sees_soon(word, comparison, value)) {
    code = detail::wait_long(world, word, comparison, value, timeout_ns);
  }
  return Members<kScope>::agree(code);
}

/// OneSided::quiet: everything that the members, or whoever met them since, have started is complete.
template <Scope kScope = Scope::kThread>
__device__ inline Code quiet(const World& world) {
  return detail::complete<kScope, true>(world);
}

/// OneSided::fence, for what the members do to `rank`. Where the proxy works on this node's words, it waits like quiet.
template <Scope kScope = Scope::kThread>
__device__ inline Code fence(const World& world, int rank) {
  const detail::About about{Call::kFence, rank, world.heap, 0};
  if (!detail::is_rank(world, rank)) return detail::finish<kScope>(world, Code::kInvalidArgument, about);
  if (has_ring(world) && !detail::in_node(world, rank)) {
    Request request;
    request.op = RequestOp::kFence;
    request.peer = static_cast<std::uint32_t>(rank);
    return detail::finish<kScope>(world, detail::ask<kScope>(world, request), about);
  }
  return detail::complete<kScope, false>(world);
}
/// The same for all ranks.
template <Scope kScope = Scope::kThread>
__device__ inline Code fence(const World& world) {
  return detail::complete<kScope, false>(world);
}

/// OneSided::barrier, by one call of one scope on each rank of the team.
template <Scope kScope = Scope::kThread>
__device__ inline Code barrier(const World& world, const TeamView& team) {
  Code code = detail::complete<kScope, false>(world);
  if (code != Code::kOk) return code;
  const std::uint64_t epoch = GpuMemory::load_acquire_device(team.epoch) + 1;
  const unsigned step = Members<kScope>::count();
  const auto num_ranks = static_cast<unsigned>(team.num_ranks);
  for (unsigned place = Members<kScope>::idx(); place < num_ranks && code == Code::kOk; place += step) {
    const TeamMate mate = team.mates[place];
    const int rank = mate.rank;
    std::uint64_t* const word = team.arrived + mate.word;
    if (detail::in_node(world, rank)) {
      detail::signal_in_node(detail::word_at(world, rank, word), epoch, SignalOp::kSet);
    } else {
      code = detail::signal_by_request(world, rank, word, epoch, SignalOp::kSet);
    }
  }
  for (unsigned place = Members<kScope>::idx(); place < num_ranks && code == Code::kOk; place += step) {
    std::uint64_t seen = 0;
    code = wait_for(world, world.timeout_ns, [&seen, &team, place, epoch] {
      seen = GpuMemory::load_acquire_system(team.arrived + place);
      return seen >= epoch;
    });
    if (code != Code::kOk) {
      Failure failure = detail::failure(world, {Call::kBarrier, team.mates[place].rank, team.arrived, 0});
      failure.seen = seen;
      failure.expected = epoch;
      fail(world, code, failure);
    }
  }
  code = Members<kScope>::agree(code);
  if (code == Code::kOk && is_leader<kScope>()) GpuMemory::store_release_device(team.epoch, epoch);
  Members<kScope>::meet();
  return code;
}

}  // namespace ferry::device

#endif  // FERRY_DEVICE_ONE_SIDED_CUH
