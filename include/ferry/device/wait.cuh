#ifndef FERRY_DEVICE_WAIT_CUH
#define FERRY_DEVICE_WAIT_CUH

/// Waits of kernels, which end by their deadline or when the host stops them, and error records.

#include <cstdint>

#include "ferry/device/memory_order.cuh"
#include "ferry/device/world.hpp"

namespace ferry::device {

/// Contents of an error record.
struct Failure {
  Call call = Call::kPut;
  int rank = -1;
  std::uint64_t offset = 0;
  std::uint64_t num_bytes = 0;
  std::int32_t comparison = 0;
  std::uint64_t seen = 0;
  std::uint64_t expected = 0;
  std::uint64_t timeout_ns = 0;
};

/// Records the error unless an earlier one is still unread by the host. Returns `code`.
__device__ __noinline__ inline Code fail(const World& world, Code code, const Failure& failure) {
  ErrorRecord& record = *world.errors;
  if (GpuMemory::load_acquire_system(&record.state) != 0) return code;
  if (GpuMemory::swap_acquire_device(&world.state->reporting, 1) != 0) return code;
  if (GpuMemory::load_acquire_system(&record.state) == 0) {
    record.code = static_cast<std::int32_t>(code);
    record.call = static_cast<std::int32_t>(failure.call);
    record.rank = failure.rank;
    record.comparison = failure.comparison;
    record.offset = failure.offset;
    record.num_bytes = failure.num_bytes;
    record.seen = failure.seen;
    record.expected = failure.expected;
    record.timeout_ns = failure.timeout_ns;
    GpuMemory::fence_system();
    GpuMemory::store_release_system(&record.state, 1);
  }
  GpuMemory::store_release_device(&world.state->reporting, 0);
  return code;
}

/// Waits until `ready()`, at most `timeout_ns` from the first look at the clock, or until the host's stop word is
/// `heeded` or more (see stop_word). One thread.
template <typename Ready>
__device__ inline Code wait_for(const World& world, std::uint64_t timeout_ns, Ready ready,
                                std::uint64_t heeded = stop_word::kRankLost) {
  // The clock is slow to read, so a wait that ends soon does not read it.
  constexpr unsigned kSpinsPerCheck = 64;
  // A read of the stop word goes over PCIe and takes longer than a poll, so it is rarer, as in the calls of a group.
  constexpr unsigned kSpinsPerStopCheck = 4 * kSpinsPerCheck;
  std::uint64_t deadline_ns = 0;
  bool stopped = false;
  for (unsigned spin = 1;; ++spin) {
    if (ready()) return Code::kOk;
    if (stopped) return Code::kPeerLost;
    if (spin % kSpinsPerCheck != 0) continue;
    const std::uint64_t now_ns = GpuMemory::now_ns();
    // Saturated: callers may pass the longest time there is.
    if (deadline_ns == 0) deadline_ns = timeout_ns > ~now_ns ? ~std::uint64_t{0} : now_ns + timeout_ns;
    if (now_ns >= deadline_ns) return Code::kTimeout;
    // `ready` is tested once more afterwards.
    if (spin % kSpinsPerStopCheck == 0) stopped = GpuMemory::load_acquire_system(&world.errors->stop) >= heeded;
  }
}

}  // namespace ferry::device

#endif  // FERRY_DEVICE_WAIT_CUH
