#ifndef FERRY_TESTS_LITMUS_DEVICE_CUH
#define FERRY_TESTS_LITMUS_DEVICE_CUH

/// What the litmus kernels share: words that differ from round to round, and how to say that one is wrong.

#include "cuda/sync/flags.cuh"
#include "gpu/litmus_kernels.hpp"

namespace ferry::test {

/// MurmurHash3's finaliser (Appleby): one to one, so equal places of different rows hold different words.
__device__ inline std::uint32_t mixed(std::uint32_t value) {
  value = (value ^ value >> 16) * 0x85EBCA6BU;
  value = (value ^ value >> 13) * 0xC2B2AE35U;
  return value ^ value >> 16;
}

/// What a row is made from.
__device__ inline std::uint32_t seed_of(std::uint32_t when, std::uint32_t where) { return mixed(mixed(when) + where); }

/// How long a row is in a round, in units.
__device__ inline int units_of_round(std::uint32_t round) {
  return 1 + static_cast<int>(mixed(round * 2) % (kMaxRowBytes / kUnitBytes));
}

__device__ inline uint4 unit_of(std::uint32_t seed, int unit) {
  const std::uint32_t first = seed + 4 * static_cast<std::uint32_t>(unit);
  return make_uint4(mixed(first), mixed(first + 1), mixed(first + 2), mixed(first + 3));
}

__device__ inline void note(LitmusReport& report, Breach breach, int where, std::uint64_t when, std::uint64_t seen,
                            std::uint64_t expected) {
  if (atomicAdd_system(&report.num_breaches, 1U) != 0) return;
  report.first = breach;
  report.where = where;
  report.when = when;
  report.seen = seen;
  report.expected = expected;
}

__device__ inline void check_word(LitmusReport& report, std::uint32_t seen, std::uint32_t expected, int word,
                                  std::uint64_t when) {
  if (seen != expected) note(report, Breach::kWord, word, when, seen, expected);
}

__device__ inline void check_unit(LitmusReport& report, uint4 seen, std::uint32_t seed, int unit, std::uint64_t when) {
  const uint4 expected = unit_of(seed, unit);
  check_word(report, seen.x, expected.x, 4 * unit, when);
  check_word(report, seen.y, expected.y, 4 * unit + 1, when);
  check_word(report, seen.z, expected.z, 4 * unit + 2, when);
  check_word(report, seen.w, expected.w, 4 * unit + 3, when);
}

/// Waits until the flag is at least `expected`; what it was then, or less after `timeout_ns`. For one thread.
__device__ inline std::uint64_t await_flag(const std::uint64_t* flag, std::uint64_t expected, std::uint64_t timeout_ns,
                                           LitmusReport& report) {
  constexpr int kSpinsPerLook = 256;
  std::uint64_t deadline_ns = 0;
  for (int spin = 1;; ++spin) {
    const std::uint64_t seen = cuda::device::load_acquire_system(flag);
    if (seen >= expected) return seen;
    if (spin % kSpinsPerLook != 0) continue;
    const std::uint64_t now = cuda::device::now_ns();
    if (deadline_ns == 0) deadline_ns = now + timeout_ns;
    if (now < deadline_ns) continue;
    atomicAdd_system(&report.num_expired, 1U);
    return seen;
  }
}

}  // namespace ferry::test

#endif  // FERRY_TESTS_LITMUS_DEVICE_CUH
