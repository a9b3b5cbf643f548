#ifndef FERRY_DEVICE_COPY_CUH
#define FERRY_DEVICE_COPY_CUH

/// Copies of arbitrary bytes by the members of a scope, in the widest units that both addresses allow. A part of 4 or 8
/// aligned bytes is a unit or lies within one, so a reader finds all of it or nothing.

#include <cstddef>
#include <cstdint>

#include "ferry/device/memory_order.cuh"
#include "ferry/device/scope.cuh"

namespace ferry::device {

/// kShared: other processors may change the source, so this multiprocessor must not trust its first-level cache.
enum class Source { kOwn, kShared };

template <typename Unit, Source kSource>
__device__ inline Unit load_unit(const Unit* address) {
  return kSource == Source::kShared ? GpuMemory::load_fresh(address) : *address;
}

template <typename Unit, Source kSource>
__device__ inline void copy_units(std::byte* to, const std::byte* from, std::uint64_t num_units, unsigned member,
                                  unsigned num_members) {
  // Loads in flight before the first store: loads of a block from another GPU take a microsecond and more.
  constexpr unsigned kUnroll = 8;
  const auto* source = reinterpret_cast<const Unit*>(from);
  auto* target = reinterpret_cast<Unit*>(to);
  std::uint64_t i = member;
  for (; i + std::uint64_t{kUnroll - 1} * num_members < num_units; i += std::uint64_t{kUnroll} * num_members) {
    Unit values[kUnroll];
#pragma unroll
    for (unsigned k = 0; k < kUnroll; ++k) values[k] = load_unit<Unit, kSource>(source + i + k * num_members);
#pragma unroll
    for (unsigned k = 0; k < kUnroll; ++k) target[i + k * num_members] = values[k];
  }
  for (; i < num_units; i += num_members) target[i] = load_unit<Unit, kSource>(source + i);
}

/// Copies whole units from `done` on if the addresses allow it, and advances `done`.
template <typename Unit, Scope kScope, Source kSource>
__device__ inline void copy_whole_units(std::byte* to, const std::byte* from, std::uint64_t num_bytes,
                                        std::uint64_t& done) {
  const auto addresses = reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from);
  if (num_bytes - done < sizeof(Unit) || addresses % sizeof(Unit) != 0) return;
  const std::uint64_t num_units = (num_bytes - done) / sizeof(Unit);
  copy_units<Unit, kSource>(to + done, from + done, num_units, Members<kScope>::idx(), Members<kScope>::count());
  done += num_units * sizeof(Unit);
}

/// Any copy. Not inlined: it is long, and a function call costs little beside many units.
template <Scope kScope, Source kSource>
__device__ __noinline__ inline void copy_any(std::byte* to, const std::byte* from, std::uint64_t num_bytes) {
  std::uint64_t done = 0;
  copy_whole_units<uint4, kScope, kSource>(to, from, num_bytes, done);
  if (done == num_bytes) return;
  copy_whole_units<std::uint64_t, kScope, kSource>(to, from, num_bytes, done);
  copy_whole_units<std::uint32_t, kScope, kSource>(to, from, num_bytes, done);
  copy_whole_units<std::uint8_t, kScope, kSource>(to, from, num_bytes, done);
}

/// Zero bits of the result show in which units the copy can be made.
__device__ inline std::uint64_t bits_of(const void* to, const void* from, std::uint64_t num_bytes) {
  return reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from) | num_bytes;
}

/// One member's part of a short copy, which has at most one unit of 16 or of 8 bytes per member. Prepared before the
/// members meet, and without branches, so that little is left to do afterwards.
template <Scope kScope>
class Piece {
 public:
  /// For a copy that may be short. `bits`: bits_of its addresses, or of addresses with the same alignment.
  __device__ Piece(void* to, const void* from, std::uint64_t num_bytes, std::uint64_t bits) {
    const unsigned shift = is_wide(bits) ? 4 : 3;
    const std::uint64_t at = std::uint64_t{Members<kScope>::idx()} << shift;
    unit_bytes_ = at < num_bytes ? 1U << shift : 0;
    to_ = static_cast<std::byte*>(to) + at;
    from_ = static_cast<const std::byte*>(from) + at;
  }

  static __device__ bool is_short(std::uint64_t num_bytes, std::uint64_t bits) {
    const std::uint64_t unit_bytes = is_wide(bits) ? sizeof(uint4) : sizeof(std::uint64_t);
    return (bits % sizeof(std::uint64_t) == 0) & (num_bytes <= Members<kScope>::count() * unit_bytes);
  }

  template <Source kSource>
  __device__ void copy() const {
    GpuMemory::copy_unit<kSource == Source::kShared>(to_, from_, unit_bytes_);
  }

 private:
  static __device__ bool is_wide(std::uint64_t bits) { return bits % sizeof(uint4) == 0; }

  unsigned unit_bytes_;  // 0: this member has no unit
  std::byte* to_;
  const std::byte* from_;
};

}  // namespace ferry::device

#endif  // FERRY_DEVICE_COPY_CUH
