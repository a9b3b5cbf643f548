#ifndef FERRY_DEVICE_ONE_SIDED_CUH
#define FERRY_DEVICE_ONE_SIDED_CUH

/// One-sided communication from inside kernels: the calls of OneSided, with the same meaning of addresses and of order.
/// A kernel takes the World that OneSided::device_world returned, and the TeamViews of its barriers, by value.
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
/// and acts once for all of them. Everything that any of them did before is ordered before the call, and all get the
/// same result.
///
/// Errors. Nothing traps and every wait has a deadline. Every code but kOk is also in the error record, which
/// OneSided::poll_errors returns. A kernel that waits for other kernels must leave them room on the GPU to run.
///
/// Inside a node the calls are loads, stores and atomics of the GPU. For other nodes they ask the proxy through a ring.
/// The program's host thread is not involved, so kernels that make calls may be captured in graphs.

#include <cstdint>
#include <type_traits>

#include "ferry/device/calls.cuh"
#include "ferry/device/comparison.hpp"
#include "ferry/one_sided.hpp"

namespace ferry::device {

/// Result of get_value.
template <typename T>
struct Got {
  Code code = Code::kOk;
  T value{};
};

/// Address at which this GPU reaches `rank`'s memory at symmetric address `data`; null where it cannot.
template <typename T>
__device__ inline T* peer_pointer(const World& world, int rank, T* data) {
  using namespace detail;
  if (!is_rank(world, rank) || !in_node(world, rank) || !is_symmetric(world, data, sizeof(T))) return nullptr;
  return peer_address(world, rank, data);
}

/// OneSided::put. `source` may be reused on return.
template <Scope kScope = Scope::kThread>
__device__ inline Code put(const World& world, int rank, void* dest, const void* source, std::uint64_t num_bytes) {
  return detail::put<kScope>(world, rank, dest, source, num_bytes, false);
}
/// put whose `source` may be reused only after a later `quiet`. Symmetric memory is not copied first.
template <Scope kScope = Scope::kThread>
__device__ inline Code put_nbi(const World& world, int rank, void* dest, const void* source, std::uint64_t num_bytes) {
  return detail::put<kScope>(world, rank, dest, source, num_bytes, true);
}

/// OneSided::get. The bytes are at `dest` on return, for the members of the scope.
template <Scope kScope = Scope::kThread>
__device__ inline Code get(const World& world, int rank, void* dest, const void* source, std::uint64_t num_bytes) {
  return detail::get<kScope>(world, rank, dest, source, num_bytes, true);
}
/// get whose bytes are at `dest` only after a later `quiet`. Waits like `get` if `dest` is not symmetric memory.
template <Scope kScope = Scope::kThread>
__device__ inline Code get_nbi(const World& world, int rank, void* dest, const void* source, std::uint64_t num_bytes) {
  return detail::get<kScope>(world, rank, dest, source, num_bytes, false);
}

/// Puts one value of 4 or 8 bytes, in one piece, at an address aligned to its size. One thread.
template <typename T>
__device__ inline Code put_value(const World& world, int rank, T* dest, std::type_identity_t<T> value) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  const bool is_whole = detail::is_aligned(world, dest);
  if (!(is_whole & detail::is_near(world, rank, dest, sizeof(T)))) {
    if (!is_whole) return detail::refuse_value(world, Call::kPut, rank, dest, sizeof(T));
    return detail::put_elsewhere<Scope::kThread>({world.stored, rank, dest, &value, sizeof(T), false});
  }
  *static_cast<volatile T*>(detail::near_address(world, rank, dest)) = value;
  return Code::kOk;
}
/// Gets one value of 4 or 8 bytes, in one piece, from an address aligned to its size. One thread.
template <typename T>
__device__ inline Got<T> get_value(const World& world, int rank, const T* source) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  Got<T> got;
  const bool is_whole = detail::is_aligned(world, source);
  if (is_whole & detail::is_near(world, rank, source, sizeof(T))) {
    got.value = *static_cast<const volatile T*>(detail::near_address(world, rank, source));
  } else if (!is_whole) {
    got.code = detail::refuse_value(world, Call::kGet, rank, source, sizeof(T));
  } else {
    // A copy, so that a loaded value stays in registers.
    T value{};
    got.code = detail::get_elsewhere<Scope::kThread>({world.stored, rank, &value, source, sizeof(T), false});
    got.value = value;
  }
  return got;
}

/// OneSided::put_signal: a rank that sees the signal by wait_until or test also sees the bytes.
template <Scope kScope = Scope::kThread>
__device__ inline Code put_signal(const World& world, int rank, void* dest, const void* source, std::uint64_t num_bytes,
                                  std::uint64_t* word, std::uint64_t value, SignalOp op) {
  return detail::put_signal<kScope>(world, rank, dest, source, num_bytes, word, value, op, false);
}
/// put_signal whose `source` may be reused only after a later `quiet`.
template <Scope kScope = Scope::kThread>
__device__ inline Code put_signal_nbi(const World& world, int rank, void* dest, const void* source,
                                      std::uint64_t num_bytes, std::uint64_t* word, std::uint64_t value, SignalOp op) {
  return detail::put_signal<kScope>(world, rank, dest, source, num_bytes, word, value, op, true);
}

/// OneSided::signal. Inside a node, and after all earlier requests to the proxy, it is seen only after everything that
/// its members did before.
template <Scope kScope = Scope::kThread>
__device__ inline Code signal(const World& world, int rank, std::uint64_t* word, std::uint64_t value, SignalOp op) {
  return detail::signal<kScope>(world, rank, word, value, op);
}
template <Scope kScope = Scope::kThread>
__device__ inline Code signal(const World& world, int rank, std::uint32_t* word, std::uint32_t value, SignalOp op) {
  return detail::signal<kScope>(world, rank, word, value, op);
}

/// OneSided::fetch_add. A warp or a block adds once, and all threads get the fetched value: for example to reserve room
/// for all of them. At block scope it takes 8 bytes of the kernel's static shared memory, as do all calls that fetch.
template <Scope kScope = Scope::kThread>
__device__ inline Fetched fetch_add(const World& world, int rank, std::uint64_t* word, std::uint64_t value) {
  return detail::fetch_once<kScope>(world, Call::kFetchAdd, rank, word, value, 0);
}
template <Scope kScope = Scope::kThread>
__device__ inline Fetched fetch_add(const World& world, int rank, std::uint32_t* word, std::uint32_t value) {
  return detail::fetch_once<kScope>(world, Call::kFetchAdd, rank, word, value, 0);
}
/// OneSided::compare_swap. A warp or a block swaps once, and all threads get the fetched value; so do the following.
template <Scope kScope = Scope::kThread>
__device__ inline Fetched compare_swap(const World& world, int rank, std::uint64_t* word, std::uint64_t expected,
                                       std::uint64_t desired) {
  return detail::fetch_once<kScope>(world, Call::kCompareSwap, rank, word, desired, expected);
}
template <Scope kScope = Scope::kThread>
__device__ inline Fetched compare_swap(const World& world, int rank, std::uint32_t* word, std::uint32_t expected,
                                       std::uint32_t desired) {
  return detail::fetch_once<kScope>(world, Call::kCompareSwap, rank, word, desired, expected);
}
/// OneSided::swap.
template <Scope kScope = Scope::kThread>
__device__ inline Fetched swap(const World& world, int rank, std::uint64_t* word, std::uint64_t value) {
  return detail::fetch_once<kScope>(world, Call::kSwap, rank, word, value, 0);
}
template <Scope kScope = Scope::kThread>
__device__ inline Fetched swap(const World& world, int rank, std::uint32_t* word, std::uint32_t value) {
  return detail::fetch_once<kScope>(world, Call::kSwap, rank, word, value, 0);
}
/// OneSided::fetch_and.
template <Scope kScope = Scope::kThread>
__device__ inline Fetched fetch_and(const World& world, int rank, std::uint64_t* word, std::uint64_t value) {
  return detail::fetch_once<kScope>(world, Call::kFetchAnd, rank, word, value, 0);
}
template <Scope kScope = Scope::kThread>
__device__ inline Fetched fetch_and(const World& world, int rank, std::uint32_t* word, std::uint32_t value) {
  return detail::fetch_once<kScope>(world, Call::kFetchAnd, rank, word, value, 0);
}
/// OneSided::fetch_or.
template <Scope kScope = Scope::kThread>
__device__ inline Fetched fetch_or(const World& world, int rank, std::uint64_t* word, std::uint64_t value) {
  return detail::fetch_once<kScope>(world, Call::kFetchOr, rank, word, value, 0);
}
template <Scope kScope = Scope::kThread>
__device__ inline Fetched fetch_or(const World& world, int rank, std::uint32_t* word, std::uint32_t value) {
  return detail::fetch_once<kScope>(world, Call::kFetchOr, rank, word, value, 0);
}
/// OneSided::fetch_xor.
template <Scope kScope = Scope::kThread>
__device__ inline Fetched fetch_xor(const World& world, int rank, std::uint64_t* word, std::uint64_t value) {
  return detail::fetch_once<kScope>(world, Call::kFetchXor, rank, word, value, 0);
}
template <Scope kScope = Scope::kThread>
__device__ inline Fetched fetch_xor(const World& world, int rank, std::uint32_t* word, std::uint32_t value) {
  return detail::fetch_once<kScope>(world, Call::kFetchXor, rank, word, value, 0);
}

/// OneSided::test.
__device__ inline bool test(const std::uint64_t* word, Comparison comparison, std::uint64_t value) {
  return compares(GpuMemory::load_acquire_system(word), comparison, value);
}

/// OneSided::wait_until. `timeout_ns` 0: the timeout of the OneSided.
template <Scope kScope = Scope::kThread>
__device__ inline Code wait_until(const World& world, const std::uint64_t* word, Comparison comparison,
                                  std::uint64_t value, std::uint64_t timeout_ns = 0) {
  Members<kScope>::meet();
  Code code = Code::kOk;
  if (is_leader<kScope>()) {
    if (!detail::is_word(world, word)) [[unlikely]] {
      const detail::About about{Call::kWaitUntil, -1, word, sizeof(*word)};
      code = detail::finish<Scope::kThread>(world, Code::kInvalidArgument, about);
    } else if (!detail::sees_soon(word, comparison, value)) {
      code = detail::wait_long(*world.stored, word, comparison, value, timeout_ns);
    }
  }
  return Members<kScope>::agree(code);
}

/// OneSided::quiet: completes everything that the members have started, and everything started by threads that have
/// synchronised with them since.
template <Scope kScope = Scope::kThread>
__device__ inline Code quiet(const World& world) {
  return detail::complete<kScope, true>(world);
}
/// OneSided::quiet of one rank: waits for no other.
template <Scope kScope = Scope::kThread>
__device__ inline Code quiet(const World& world, int rank) {
  return detail::complete_at<kScope>(world, rank);
}

/// OneSided::fence, for the members' accesses to `rank`. Where the proxy works on this node's words, it waits like
/// quiet.
template <Scope kScope = Scope::kThread>
__device__ inline Code fence(const World& world, int rank) {
  const detail::About about{Call::kFence, rank, world.heap, 0};
  if (!detail::is_rank(world, rank)) return detail::finish<kScope>(world, Code::kInvalidArgument, about);
  if (has_ring(world) && !detail::in_node(world, rank)) {
    Request request;
    request.op = RequestOp::kFence;
    request.peer = static_cast<std::uint32_t>(rank);
    return detail::finish<kScope>(world, detail::ask<kScope>(*world.stored, request), about);
  }
  return detail::complete<kScope, false>(world);
}
/// fence for all ranks.
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
      detail::signal_in_node(detail::peer_address(world, rank, word), epoch, SignalOp::kSet);
    } else {
      code = detail::signal_by_request(*world.stored, rank, word, epoch, SignalOp::kSet);
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
      fail(*world.stored, code, failure);
    }
  }
  code = Members<kScope>::agree(code);
  if (code == Code::kOk && is_leader<kScope>()) GpuMemory::store_release_device(team.epoch, epoch);
  Members<kScope>::meet();
  return code;
}

}  // namespace ferry::device

#endif  // FERRY_DEVICE_ONE_SIDED_CUH
