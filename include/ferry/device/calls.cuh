#ifndef FERRY_DEVICE_CALLS_CUH
#define FERRY_DEVICE_CALLS_CUH

/// Implementation of the calls of one_sided.cuh: inline for near ranks (see World), by functions that are not inlined
/// for all others.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ferry/device/block_word.cuh"
#include "ferry/device/checks.cuh"
#include "ferry/device/comparison.hpp"
#include "ferry/device/compute_here.hpp"
#include "ferry/device/far_calls.cuh"
#include "ferry/one_sided.hpp"

namespace ferry::device {

namespace detail {

/// Whether this GPU makes this signal at once, through near_address, and cannot fail.
template <typename Word>
__device__ inline bool signals_near(const World& world, int rank, const Word* word, SignalOp op) {
  return is_near_word(world, rank, word, op == SignalOp::kSet ? world.num_near : world.num_near_words);
}

/// A signal by this GPU, ordered after everything that this thread, or a thread that it has synchronised with, did
/// before. One thread.
template <typename Word>
__device__ inline void signal_in_node(Word* target, std::type_identity_t<Word> value, SignalOp op) {
  if (op == SignalOp::kSet) {
    GpuMemory::store_release_system(target, value);
  } else {
    GpuMemory::add_release_system(target, value);
  }
}

/// A copy inside the node. All members call it, after a meet().
template <Scope kScope, Source kSource>
__device__ inline Code copy_in_node(void* to, const void* from, std::uint64_t num_bytes) {
  copy_any<kScope, kSource>(static_cast<std::byte*>(to), static_cast<const std::byte*>(from), num_bytes);
  Members<kScope>::meet();
  return Code::kOk;
}

/// Arguments of a call that concerns no near rank, or is refused. Passed in memory, which is written only then: the
/// compiler loads the arguments of a function early, also in calls that do not reach it.
struct Given {
  const World* world;
  int rank;
  void* dest;
  const void* source;
  std::uint64_t num_bytes;
  bool direct;  ///< the source may be read, or a get's destination written, until a quiet
  std::uint64_t* word = nullptr;
  std::uint64_t value = 0;
  SignalOp op = SignalOp::kSet;
};

/// A put to a rank that is not near, or one that is refused. All members call it, after a meet(), as they do every
/// *_elsewhere.
template <Scope kScope>
__device__ __noinline__ inline Code put_elsewhere(const Given& given) {
  const World& world = *given.world;
  const int rank = given.rank;
  void* const dest = given.dest;
  const std::uint64_t num_bytes = given.num_bytes;
  const About about{Call::kPut, rank, dest, num_bytes};
  if (!is_rank(world, rank) || !is_symmetric(world, dest, num_bytes)) {
    return finish<kScope>(world, Code::kInvalidArgument, about);
  }
  if (in_node(world, rank)) {
    return copy_in_node<kScope, Source::kOwn>(at_peer(world, rank, dest), given.source, num_bytes);
  }
  if (num_bytes == 0) return Code::kOk;
  Request request = put_request(world, rank, dest, num_bytes);
  return finish<kScope>(world, put_by_request<kScope>(world, request, given.source, given.direct), about);
}

template <Scope kScope>
__device__ inline Code put(const World& world, int rank, void* dest, const void* source, std::uint64_t num_bytes,
                           bool direct) {
  const std::uint64_t bits = bits_of(dest, source, num_bytes);
  const Piece<kScope> piece(near_address(world, rank, dest), source, num_bytes, bits);
  const bool is_here = is_near(world, rank, dest, num_bytes);
  const bool is_quick = is_here & Piece<kScope>::is_short(num_bytes, bits);
  Members<kScope>::meet();
  if (is_quick) [[likely]] {
    piece.template copy<Source::kOwn>();
    Members<kScope>::meet();
    return Code::kOk;
  }
  if (!is_here) {
    return put_elsewhere<kScope>({world.stored, rank, dest, source, num_bytes, direct});
  }
  return copy_in_node<kScope, Source::kOwn>(near_address(world, rank, dest), source, num_bytes);
}

/// A put and its signal, or the signal alone, under the conditions of put_elsewhere.
template <Scope kScope>
__device__ __noinline__ inline Code put_signal_elsewhere(const Given& given) {
  const World& world = *given.world;
  const int rank = given.rank;
  const std::uint64_t num_bytes = given.num_bytes;
  std::uint64_t* const word = given.word;
  const SignalOp op = given.op;
  const About about{Call::kSignal, rank, word, sizeof(*word)};
  if (!is_rank(world, rank) || !is_word(world, word)) return finish<kScope>(world, Code::kInvalidArgument, about);
  if (num_bytes != 0 && !in_node(world, rank) && is_symmetric(world, given.dest, num_bytes)) {
    Request request = put_signal_request(world, rank, given.dest, num_bytes, word, given.value, op);
    return finish<kScope>(world, put_by_request<kScope>(world, request, given.source, given.direct), about);
  }
  if (num_bytes != 0) {
    if (const Code code = put_elsewhere<kScope>(given); code != Code::kOk) return code;
  }
  // All members have met: the request or the release of the leader covers the writes of all.
  Code code = Code::kOk;
  if (is_leader<kScope>()) {
    if (in_node(world, rank) && (world.gpu_words || op == SignalOp::kSet)) {
      signal_in_node(peer_address(world, rank, word), given.value, op);
    } else {
      code = signal_by_request(world, rank, word, given.value, op);
    }
  }
  return finish<kScope>(world, Members<kScope>::agree(code), about);
}

template <Scope kScope>
__device__ inline Code put_signal(const World& world, int rank, void* dest, const void* source, std::uint64_t num_bytes,
                                  std::uint64_t* word, std::uint64_t value, SignalOp op, bool direct) {
  const std::uint64_t bits = bits_of(dest, source, num_bytes);
  const Piece<kScope> piece(near_address(world, rank, dest), source, num_bytes, bits);
  const bool is_word_here = signals_near(world, rank, word, op);
  const bool is_dest_here = (num_bytes == 0) | is_near(world, rank, dest, num_bytes);
  const bool is_here = is_word_here & is_dest_here;
  const bool is_quick = is_here & Piece<kScope>::is_short(num_bytes, bits);
  std::uint64_t* word_there = near_address(world, rank, word);
  compute_here(word_there);
  Members<kScope>::meet();
  if (is_quick) [[likely]] {
    piece.template copy<Source::kOwn>();
  } else if (is_here) {
    copy_any<kScope, Source::kOwn>(static_cast<std::byte*>(near_address(world, rank, dest)),
                                   static_cast<const std::byte*>(source), num_bytes);
  } else {
    return put_signal_elsewhere<kScope>({world.stored, rank, dest, source, num_bytes, direct, word, value, op});
  }
  Members<kScope>::meet();
  // All members have met: the release of the leader covers the writes of all.
  if (is_leader<kScope>()) signal_in_node(word_there, value, op);
  Members<kScope>::meet();
  return Code::kOk;
}

/// A signal to a word of 4 bytes, under the conditions of put_elsewhere.
template <Scope kScope>
__device__ __noinline__ inline Code narrow_signal_elsewhere(const World& world, int rank, std::uint32_t* word,
                                                            std::uint32_t value, SignalOp op) {
  const About about{Call::kSignal, rank, word, sizeof(*word)};
  if (!is_rank(world, rank) || !is_word(world, word)) return finish<kScope>(world, Code::kInvalidArgument, about);
  Code code = Code::kOk;
  if (is_leader<kScope>()) {
    if (in_node(world, rank) && (world.gpu_words || op == SignalOp::kSet)) {
      signal_in_node(peer_address(world, rank, word), value, op);
    } else {
      code = signal_by_request(world, rank, word, value, op);
    }
  }
  return finish<kScope>(world, Members<kScope>::agree(code), about);
}

/// A signal without a put.
template <Scope kScope, typename Word>
__device__ inline Code signal(const World& world, int rank, Word* word, std::type_identity_t<Word> value, SignalOp op) {
  const bool is_here = signals_near(world, rank, word, op);
  Word* word_there = near_address(world, rank, word);
  compute_here(word_there);
  Members<kScope>::meet();
  // All members have met: the release of the leader covers the writes of all.
  if (is_here & is_leader<kScope>()) signal_in_node(word_there, value, op);
  if (!is_here) [[unlikely]] {
    if constexpr (sizeof(Word) == sizeof(std::uint64_t)) {
      return put_signal_elsewhere<kScope>({world.stored, rank, word, word, 0, false, word, value, op});
    } else {
      return narrow_signal_elsewhere<kScope>(*world.stored, rank, word, value, op);
    }
  }
  Members<kScope>::meet();
  return Code::kOk;
}

/// A get from a rank that is not near, or one that is refused.
template <Scope kScope>
__device__ __noinline__ inline Code get_elsewhere(const Given& given) {
  const World& world = *given.world;
  const int rank = given.rank;
  const void* const source = given.source;
  const std::uint64_t num_bytes = given.num_bytes;
  const About about{Call::kGet, rank, source, num_bytes};
  if (!is_rank(world, rank) || !is_symmetric(world, source, num_bytes)) {
    return finish<kScope>(world, Code::kInvalidArgument, about);
  }
  if (in_node(world, rank)) {
    return copy_in_node<kScope, Source::kShared>(given.dest, at_peer(world, rank, source), num_bytes);
  }
  if (num_bytes == 0) return Code::kOk;
  const bool now = !given.direct;
  return finish<kScope>(world, get_by_request<kScope>(world, rank, given.dest, source, num_bytes, now), about);
}

/// A get; `now`: the bytes are at `dest` when it returns.
template <Scope kScope>
__device__ inline Code get(const World& world, int rank, void* dest, const void* source, std::uint64_t num_bytes,
                           bool now) {
  const std::uint64_t bits = bits_of(dest, source, num_bytes);
  const Piece<kScope> piece(dest, near_address(world, rank, source), num_bytes, bits);
  const bool is_here = is_near(world, rank, source, num_bytes);
  const bool is_quick = is_here & Piece<kScope>::is_short(num_bytes, bits);
  Members<kScope>::meet();
  if (is_quick) [[likely]] {
    piece.template copy<Source::kShared>();
    Members<kScope>::meet();
    return Code::kOk;
  }
  if (!is_here) {
    return get_elsewhere<kScope>({world.stored, rank, dest, source, num_bytes, !now});
  }
  return copy_in_node<kScope, Source::kShared>(dest, near_address(world, rank, source), num_bytes);
}

/// put_value or get_value of a misaligned value. One thread.
__device__ inline Code refuse_value(const World& world, Call call, int rank, const void* data,
                                    std::uint64_t num_bytes) {
  return finish<Scope::kThread>(world, Code::kInvalidArgument, {call, rank, data, num_bytes});
}

/// Request for a call that fetches.
__device__ inline RequestOp fetching_op(Call call) {
  switch (call) {
    case Call::kFetchAdd:
      return RequestOp::kFetchAdd;
    case Call::kCompareSwap:
      return RequestOp::kCompareSwap;
    case Call::kSwap:
      return RequestOp::kSwap;
    case Call::kFetchAnd:
      return RequestOp::kFetchAnd;
    case Call::kFetchOr:
      return RequestOp::kFetchOr;
    default:
      return RequestOp::kFetchXor;
  }
}

/// A call that fetches, by this GPU. `operand`: value that compare_swap expects. One thread.
template <typename Word>
__device__ inline Fetched fetch_in_node(Call call, Word* target, Word value, Word operand) {
  switch (call) {
    case Call::kFetchAdd:
      return {Code::kOk, GpuMemory::add_system(target, value)};
    case Call::kCompareSwap:
      return {Code::kOk, GpuMemory::compare_swap_system(target, operand, value)};
    case Call::kSwap:
      return {Code::kOk, GpuMemory::swap_system(target, value)};
    case Call::kFetchAnd:
      return {Code::kOk, GpuMemory::and_system(target, value)};
    case Call::kFetchOr:
      return {Code::kOk, GpuMemory::or_system(target, value)};
    default:
      return {Code::kOk, GpuMemory::xor_system(target, value)};
  }
}

/// The same at a rank that is not near, or by the proxy, or refused. One thread.
template <typename Word>
__device__ __noinline__ inline Fetched fetch_elsewhere(const World& world, Call call, int rank, Word* word, Word value,
                                                       Word operand) {
  const About about{call, rank, word, sizeof(*word)};
  if (!is_rank(world, rank) || !is_word(world, word)) {
    return {finish<Scope::kThread>(world, Code::kInvalidArgument, about), 0};
  }
  if (in_node(world, rank) && world.gpu_words) {
    return fetch_in_node(call, peer_address(world, rank, word), value, operand);
  }
  Fetched fetched = fetch_by_request(world, fetching_op(call), static_cast<std::uint32_t>(rank), offset_of(world, word),
                                     0, 0, value, operand, sizeof(Word) == sizeof(std::uint32_t));
  fetched.code = finish<Scope::kThread>(world, fetched.code, about);
  return fetched;
}

template <typename Word>
__device__ inline Fetched fetch(const World& world, Call call, int rank, Word* word, Word value, Word operand) {
  if (!is_near_word(world, rank, word, world.num_near_words)) [[unlikely]] {
    return fetch_elsewhere(*world.stored, call, rank, word, value, operand);
  }
  return fetch_in_node(call, near_address(world, rank, word), value, operand);
}

/// Fetches once for all members; each gets the result.
template <Scope kScope, typename Word>
__device__ inline Fetched fetch_once(const World& world, Call call, int rank, Word* word,
                                     std::type_identity_t<Word> value, std::type_identity_t<Word> operand) {
  if constexpr (kScope == Scope::kThread) return fetch(world, call, rank, word, value, operand);
  Members<kScope>::meet();
  Fetched fetched;
  if (is_leader<kScope>()) {
    fetched = fetch(world, call, rank, word, value, operand);
    if constexpr (kScope == Scope::kBlock) block_word() = fetched.value;
  }
  fetched.code = Members<kScope>::agree(fetched.code);
  // No thread writes the block's word again before all have read it and met, as the next call begins.
  fetched.value = kScope == Scope::kBlock ? block_word() : __shfl_sync(kEveryLane, fetched.value, 0);
  return fetched;
}

/// Polls the word without reading the clock, for about as long as a message between GPUs takes.
__device__ inline bool sees_soon(const std::uint64_t* word, Comparison comparison, std::uint64_t value) {
  constexpr unsigned kLooks = 64;
#pragma unroll 1
  for (unsigned look = 0; look < kLooks; ++look) {
    if (compares(GpuMemory::load_acquire_system(word), comparison, value)) return true;
  }
  return false;
}

/// Wait with a deadline, after sees_soon. `timeout_ns` 0: the timeout of the OneSided. One thread.
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

/// Completes everything that the members have started. `kTotal`: if several ranks complete and then read each other's
/// writes, at least one of them sees the other's write.
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
    if (has_ring(world)) code = quiet_of_requests(*world.stored);
  }
  return finish<kScope>(world, Members<kScope>::agree(code), {Call::kQuiet, -1, world.heap, 0});
}

/// Completes everything that the members have started to one rank, like complete<kScope, true>.
template <Scope kScope>
__device__ inline Code complete_at(const World& world, int rank) {
  const About about{Call::kQuiet, rank, world.heap, 0};
  if (!is_rank(world, rank)) return finish<kScope>(world, Code::kInvalidArgument, about);
  Members<kScope>::meet();
  Code code = Code::kOk;
  if (is_leader<kScope>()) {
    GpuMemory::fence_total_system();
    if (has_ring(world)) code = quiet_of_requests_to(*world.stored, rank);
  }
  return finish<kScope>(world, Members<kScope>::agree(code), about);
}

}  // namespace detail

}  // namespace ferry::device

#endif  // FERRY_DEVICE_CALLS_CUH
