#ifndef FERRY_DEVICE_COPY_CUH
#define FERRY_DEVICE_COPY_CUH

/// Copies of any bytes by the members of a scope, in the widest units that both addresses allow. A part of 4 or 8
/// aligned bytes is one unit or lies in one, so whoever reads it finds all of it or nothing.

#include <cstddef>
#include <cstdint>

#include "ferry/device/memory_order.cuh"
#include "ferry/device/scope.cuh"

namespace ferry::device {

/// What is read may be changed by other processors, so that this one must not trust its first-level cache.
enum class Source { kOwn, kShared };

template <typename Unit, Source kSource>
__device__ inline Unit load_unit(const Unit* address) {
  return kSource == Source::kShared ? GpuMemory::load_fresh(address) : *address;
}

template <typename Unit, Source kSource>
__device__ inline void copy_units(std::byte* to, const std::byte* from, std::uint64_t num_units, unsigned member,
                                  unsigned num_members) {
  // Loads in flight before the first store: those of a block from another GPU take a microsecond and more.
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

/// Not inlined: it is long, and a call takes little beside so many units.
template <typename Unit, Source kSource>
__device__ __noinline__ inline void copy_many_units(std::byte* to, const std::byte* from, std::uint64_t num_units,
                                                    unsigned member, unsigned num_members) {
  copy_units<Unit, kSource>(to, from, num_units, member, num_members);
}

/// The same, where most copies are of at most one unit for each member.
template <typename Unit, Source kSource>
__device__ inline void copy_few_or_many(std::byte* to, const std::byte* from, std::uint64_t num_units, unsigned member,
                                        unsigned num_members) {
  if (num_units > num_members) return copy_many_units<Unit, kSource>(to, from, num_units, member, num_members);
  if (member >= num_units) return;
  reinterpret_cast<Unit*>(to)[member] = load_unit<Unit, kSource>(reinterpret_cast<const Unit*>(from) + member);
}

/// Copies whole units from `done` on, if the addresses allow that; `done` moves on.
template <typename Unit, Scope kScope, Source kSource>
__device__ inline void copy_whole_units(std::byte* to, const std::byte* from, std::uint64_t num_bytes,
                                        std::uint64_t& done) {
  const auto addresses = reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from);
  if (num_bytes - done < sizeof(Unit) || addresses % sizeof(Unit) != 0) return;
  const std::uint64_t num_units = (num_bytes - done) / sizeof(Unit);
  copy_units<Unit, kSource>(to + done, from + done, num_units, Members<kScope>::idx(), Members<kScope>::count());
  done += num_units * sizeof(Unit);
}

/// Not inlined: it is long, and programs that care for time copy whole units.
template <Scope kScope, Source kSource>
__device__ __noinline__ inline void copy_pieces(std::byte* to, const std::byte* from, std::uint64_t num_bytes) {
  std::uint64_t done = 0;
  copy_whole_units<uint4, kScope, kSource>(to, from, num_bytes, done);
  copy_whole_units<std::uint64_t, kScope, kSource>(to, from, num_bytes, done);
  copy_whole_units<std::uint32_t, kScope, kSource>(to, from, num_bytes, done);
  copy_whole_units<std::uint8_t, kScope, kSource>(to, from, num_bytes, done);
}

template <Scope kScope, Source kSource>
__device__ inline void copy_bytes(std::byte* to, const std::byte* from, std::uint64_t num_bytes) {
  const std::uint64_t bits = reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from) | num_bytes;
  const unsigned member = Members<kScope>::idx();
  const unsigned num_members = Members<kScope>::count();
  if (bits % sizeof(uint4) == 0) {
    copy_few_or_many<uint4, kSource>(to, from, num_bytes / sizeof(uint4), member, num_members);
  } else if (bits % sizeof(std::uint64_t) == 0 && num_bytes / sizeof(std::uint64_t) <= num_members) {
    copy_few_or_many<std::uint64_t, kSource>(to, from, num_bytes / sizeof(std::uint64_t), member, num_members);
  } else {
    copy_pieces<kScope, kSource>(to, from, num_bytes);
  }
}

}  // namespace ferry::device

#endif  // FERRY_DEVICE_COPY_CUH
