#ifndef FERRY_TESTS_EMULATOR_CUDA_EMULATED_HPP
#define FERRY_TESTS_EMULATOR_CUDA_EMULATED_HPP

/// CUDA's keywords and functions for kernels compiled as C++. Included before all other code of a kernel's source.
/// `__shared__` is missing: kernels get all shared memory from cuda/sync/shared_memory.cuh.

#include <cuda_runtime_api.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "emulator/emulator.hpp"

// The names are CUDA's.
// NOLINTBEGIN(readability-identifier-naming)
#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __launch_bounds__
#undef __forceinline__
#undef __noinline__
#undef __align__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __noinline__
#define __align__(bytes) alignas(bytes)
#define __grid_constant__

#define threadIdx (::ferry::emulator::place().thread)
#define blockIdx (::ferry::emulator::place().block)
#define blockDim (::ferry::emulator::place().num_threads)
#define gridDim (::ferry::emulator::place().num_blocks)

using std::isnan;
using std::max;
using std::min;

namespace ferry::emulator {

template <typename T>
std::uint64_t to_word(T value) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t));
  std::uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  return word;
}

template <typename T>
T from_word(std::uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof(T));
  return value;
}

/// Value of lane `lane`.
template <typename T>
T shuffle(const char* operation, unsigned mask, T value, int lane) {
  return from_word<T>(meet_lanes(operation, mask, to_word(value))[lane & 31]);
}

inline int own_lane() { return static_cast<int>(place().thread.x % 32); }

/// Applies `fold(result, value of a lane)` over the lanes of `mask`.
template <typename T, typename Fold>
T reduce(const char* operation, unsigned mask, T value, T result, Fold fold) {
  const std::uint64_t* lanes = meet_lanes(operation, mask, to_word(value));
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1U) != 0) result = fold(result, from_word<T>(lanes[lane]));
  }
  return result;
}

}  // namespace ferry::emulator

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return ferry::emulator::shuffle("__shfl_sync", mask, value, lane);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return ferry::emulator::shuffle("__shfl_xor_sync", mask, value, ferry::emulator::own_lane() ^ lanes);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance) {
  const int lane = ferry::emulator::own_lane();
  const int from = lane - static_cast<int>(distance);
  return ferry::emulator::shuffle("__shfl_up_sync", mask, value, from < 0 ? lane : from);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance) {
  const int lane = ferry::emulator::own_lane();
  const int from = lane + static_cast<int>(distance);
  return ferry::emulator::shuffle("__shfl_down_sync", mask, value, from > 31 ? lane : from);
}

inline void __syncwarp(unsigned mask = 0xFFFFFFFFU) { ferry::emulator::meet_lanes("__syncwarp", mask, 0); }
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const std::uint64_t* lanes = ferry::emulator::meet_lanes("__ballot_sync", mask, predicate != 0 ? 1 : 0);
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= static_cast<unsigned>(lanes[lane]) << lane;
  return votes & mask;
}
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask ? 1 : 0; }
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0 ? 1 : 0; }
template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
  const std::uint64_t own = ferry::emulator::to_word(value);
  const std::uint64_t* lanes = ferry::emulator::meet_lanes("__match_any_sync", mask, own);
  unsigned equal = 0;
  for (int lane = 0; lane < 32; ++lane) equal |= (lanes[lane] == own ? 1U : 0U) << lane;
  return equal & mask;
}
template <typename T>
T __reduce_add_sync(unsigned mask, T value) {
  return ferry::emulator::reduce("__reduce_add_sync", mask, value, T{0},
                                 [](T a, T b) { return static_cast<T>(a + b); });
}
template <typename T>
T __reduce_min_sync(unsigned mask, T value) {
  return ferry::emulator::reduce("__reduce_min_sync", mask, value, value, [](T a, T b) { return b < a ? b : a; });
}
template <typename T>
T __reduce_max_sync(unsigned mask, T value) {
  return ferry::emulator::reduce("__reduce_max_sync", mask, value, value, [](T a, T b) { return a < b ? b : a; });
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
  return ferry::emulator::reduce("__reduce_or_sync", mask, value, 0U, [](unsigned a, unsigned b) { return a | b; });
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned value) {
  return ferry::emulator::reduce("__reduce_and_sync", mask, value, ~0U, [](unsigned a, unsigned b) { return a & b; });
}

inline void __syncthreads() { ferry::emulator::meet_block(true); }
inline int __syncthreads_and(int predicate) { return ferry::emulator::meet_block(predicate != 0).all ? 1 : 0; }
inline int __syncthreads_or(int predicate) { return ferry::emulator::meet_block(predicate != 0).any ? 1 : 0; }
inline int __syncthreads_count(int predicate) { return ferry::emulator::meet_block(predicate != 0).count; }

inline void __nanosleep(unsigned /*duration_ns*/) { ferry::emulator::poll(); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __popc(unsigned value) { return std::popcount(value); }
inline int __clz(int value) { return std::countl_zero(static_cast<unsigned>(value)); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(high) << 32 | low;
  unsigned picked = 0;
  for (unsigned i = 0; i < 4; ++i) {
    picked |= static_cast<unsigned>(bytes >> ((selector >> (4 * i) & 7U) * 8) & 0xFFU) << (8 * i);
  }
  return picked;
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }

template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T __ldcg(const T* address) {
  return *address;
}
template <typename T>
void __stcg(T* address, T value) {
  *address = value;
}

namespace ferry::emulator {

/// Replaces a value by `change(value)`, and returns the old value.
template <typename T, typename Change>
T exchange_atomically(T* address, Change change) {
  about_to_store();
  const T before = *address;
  *address = change(before);
  return before;
}

}  // namespace ferry::emulator

template <typename T, typename U>
T atomicAdd(T* address, U value) {
  return ferry::emulator::exchange_atomically(address, [value](T before) { return before + static_cast<T>(value); });
}
template <typename T, typename U>
T atomicAdd_system(T* address, U value) {
  return atomicAdd(address, value);
}
template <typename T, typename U>
T atomicMin(T* address, U value) {
  return ferry::emulator::exchange_atomically(address,
                                              [value](T before) { return std::min(before, static_cast<T>(value)); });
}
template <typename T, typename U>
T atomicMax(T* address, U value) {
  return ferry::emulator::exchange_atomically(address,
                                              [value](T before) { return std::max(before, static_cast<T>(value)); });
}
template <typename T, typename U>
T atomicOr(T* address, U value) {
  return ferry::emulator::exchange_atomically(address, [value](T before) { return before | static_cast<T>(value); });
}
template <typename T, typename U>
T atomicExch(T* address, U value) {
  return ferry::emulator::exchange_atomically(address, [value](T) { return static_cast<T>(value); });
}
template <typename T, typename U, typename V>
T atomicCAS(T* address, U expected, V value) {
  return ferry::emulator::exchange_atomically(
      address, [=](T before) { return before == static_cast<T>(expected) ? static_cast<T>(value) : before; });
}
template <typename T, typename U, typename V>
T atomicCAS_system(T* address, U expected, V value) {
  return atomicCAS(address, expected, value);
}

// Overloads for kernels, as in the runtime's header for nvcc.
template <typename Params>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)(Params)) {
  return cudaFuncGetAttributes(attributes, reinterpret_cast<const void*>(kernel));
}
template <typename Params>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Params), cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

// NOLINTEND(readability-identifier-naming)

#endif  // FERRY_TESTS_EMULATOR_CUDA_EMULATED_HPP
