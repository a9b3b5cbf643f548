#ifndef FERRY_CPU_ROWS_ROW_SUM_KERNEL_HPP
#define FERRY_CPU_ROWS_ROW_SUM_KERNEL_HPP

/// Loops behind row_sum.hpp, included by one source file per instruction set. Everything has internal linkage and uses
/// no library code except intrinsics, which are always inlined, so that the linker can never put one file's
/// instructions into another file's functions.

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "cpu/rows/row_sum.hpp"

namespace ferry::cpu {
namespace {

/// Lanes of one vector: those of a register.
#if defined(__AVX512F__)
constexpr std::size_t kLanes = 16;
#elif defined(__FMA__) && defined(__AVX2__)
constexpr std::size_t kLanes = 8;
#else
constexpr std::size_t kLanes = 4;
#endif
/// Vectors summed together in the two-step sum, which needs two accumulators for each.
#if defined(__AVX512F__)
constexpr std::size_t kGroupVectors = 8;
#else
constexpr std::size_t kGroupVectors = 4;
#endif
/// Vectors summed together: enough independent additions to hide their latency (4 cycles, two per cycle, on current
/// x86).
constexpr std::size_t kVectors = 8;

using Floats = float __attribute__((vector_size(kLanes * 4)));
using Words = std::uint32_t __attribute__((vector_size(kLanes * 4)));
using Masks = std::int32_t __attribute__((vector_size(kLanes * 4)));
using Halves = std::uint16_t __attribute__((vector_size(kLanes * 2)));

/// weight * row + acc, rounded once. Uses a named instruction, because compilers decide by their tuning whether to fuse
/// a product and a sum.
inline __attribute__((always_inline)) Floats multiply_add(float weight, const Floats& row, const Floats& acc) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(_mm512_set1_ps(weight), row, acc);
#elif defined(__FMA__) && defined(__AVX2__)
  return _mm256_fmadd_ps(_mm256_set1_ps(weight), row, acc);
#elif defined(__aarch64__)
  return vfmaq_n_f32(acc, row, weight);
#else
  Floats result = acc;
  for (std::size_t i = 0; i < kLanes; ++i) result[i] = __builtin_fmaf(weight, row[i], acc[i]);
  return result;
#endif
}

#if defined(__AVX512F__)
/// With this mask the conversions below need no undefined vector, for which GCC 12 warns in its own header.
constexpr __mmask16 kAllLanes = 0xFFFF;
#endif

/// Uses a named instruction, because GCC 12 and 13 compile __builtin_convertvector into five instructions instead of
/// one.
inline __attribute__((always_inline)) Words widen(const Halves& halves) {
#if defined(__AVX512F__)
  return reinterpret_cast<Words>(_mm512_maskz_cvtepu16_epi32(kAllLanes, reinterpret_cast<__m256i>(halves)));
#elif defined(__FMA__) && defined(__AVX2__)
  return reinterpret_cast<Words>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(halves)));
#else
  return __builtin_convertvector(halves, Words);
#endif
}

/// For words below 2^16.
inline __attribute__((always_inline)) Halves narrow(const Words& words) {
#if defined(__AVX512F__)
  return reinterpret_cast<Halves>(_mm512_maskz_cvtepi32_epi16(kAllLanes, reinterpret_cast<__m512i>(words)));
#elif defined(__FMA__) && defined(__AVX2__)
  const auto whole = reinterpret_cast<__m256i>(words);
  return reinterpret_cast<Halves>(_mm_packus_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1)));
#else
  return __builtin_convertvector(words, Halves);
#endif
}

struct Bf16 {
  static constexpr std::size_t kElementBytes = 2;

  static inline __attribute__((always_inline)) Floats load(const std::byte* from) {
    Halves halves;
    __builtin_memcpy(&halves, from, sizeof(halves));
    const Words words = widen(halves) << 16;
    Floats floats;
    __builtin_memcpy(&floats, &words, sizeof(floats));
    return floats;
  }

  /// Rounds to nearest, ties to even, into the upper half of each word; the lower half is unspecified.
  static inline __attribute__((always_inline)) Words round_upper(const Floats& floats) {
    Words words;
    __builtin_memcpy(&words, &floats, sizeof(words));
    const Words canonical_nan = Words{} + 0x7FFF0000U;
    const Masks is_nan = floats != floats;
    return is_nan ? canonical_nan : words + 0x7FFFU + ((words >> 16) & 1U);
  }

  static inline __attribute__((always_inline)) void store(std::byte* to, const Floats& floats) {
    const Halves halves = narrow(round_upper(floats) >> 16);
    __builtin_memcpy(to, &halves, sizeof(halves));
  }

  /// Value that a load returns after a store.
  static inline __attribute__((always_inline)) Floats round(const Floats& floats) {
    const Words words = round_upper(floats) & 0xFFFF0000U;
    Floats rounded;
    __builtin_memcpy(&rounded, &words, sizeof(rounded));
    return rounded;
  }
};

struct Float32 {
  static constexpr std::size_t kElementBytes = 4;

  static inline __attribute__((always_inline)) Floats load(const std::byte* from) {
    Floats floats;
    __builtin_memcpy(&floats, from, sizeof(floats));
    return floats;
  }

  static inline __attribute__((always_inline)) void store(std::byte* to, const Floats& floats) {
    Words words;
    __builtin_memcpy(&words, &floats, sizeof(words));
    const Words canonical_nan = Words{} + 0x7FFFFFFFU;
    const Masks is_nan = floats != floats;
    const Words chosen = is_nan ? canonical_nan : words;
    __builtin_memcpy(to, &chosen, sizeof(chosen));
  }

  /// Keeps NaNs, with any bits.
  static inline __attribute__((always_inline)) Floats round(const Floats& floats) { return floats; }
};

template <typename Element, bool kWeighted, std::size_t kCount>
inline __attribute__((always_inline)) void sum_block(const RowSum& sum, std::size_t offset) {
  Floats acc[kCount] = {};
  for (std::size_t row_idx = 0; row_idx < sum.num_rows; ++row_idx) {
    const std::byte* const row = sum.rows[row_idx] + offset;
    for (std::size_t i = 0; i < kCount; ++i) {
      const Floats values = Element::load(row + i * kLanes * Element::kElementBytes);
      acc[i] = kWeighted ? multiply_add(sum.weights[row_idx], values, acc[i]) : acc[i] + values;
    }
  }
  for (std::size_t i = 0; i < kCount; ++i)
    Element::store(sum.out + offset + i * kLanes * Element::kElementBytes, acc[i]);
}

/// Sums in two steps. Sums of groups never leave the registers.
template <typename Element, std::size_t kCount>
inline __attribute__((always_inline)) void sum_group_block(const RowSum& sum, std::size_t offset) {
  Floats total[kCount] = {};
  std::size_t row_idx = 0;
  for (std::size_t group = 0; group < sum.num_groups; ++group) {
    Floats acc[kCount] = {};
    for (; row_idx < sum.group_ends[group]; ++row_idx) {
      const std::byte* const row = sum.rows[row_idx] + offset;
      for (std::size_t i = 0; i < kCount; ++i) {
        const Floats values = Element::load(row + i * kLanes * Element::kElementBytes);
        acc[i] = multiply_add(sum.weights[row_idx], values, acc[i]);
      }
    }
    for (std::size_t i = 0; i < kCount; ++i) total[i] = total[i] + Element::round(acc[i]);
  }
  for (std::size_t i = 0; i < kCount; ++i) {
    Element::store(sum.out + offset + i * kLanes * Element::kElementBytes, total[i]);
  }
}

/// Sums the last elements, fewer than a vector, through a padded copy.
template <typename Element>
inline __attribute__((always_inline)) void sum_group_tail(const RowSum& sum, std::size_t offset) {
  constexpr std::size_t kVectorBytes = kLanes * Element::kElementBytes;
  const std::size_t tail_bytes = sum.row_bytes - offset;
  Floats total = {};
  std::size_t row_idx = 0;
  for (std::size_t group = 0; group < sum.num_groups; ++group) {
    Floats acc = {};
    for (; row_idx < sum.group_ends[group]; ++row_idx) {
      std::byte padded[kVectorBytes] = {};
      __builtin_memcpy(padded, sum.rows[row_idx] + offset, tail_bytes);
      acc = multiply_add(sum.weights[row_idx], Element::load(padded), acc);
    }
    total = total + Element::round(acc);
  }
  std::byte padded[kVectorBytes];
  Element::store(padded, total);
  __builtin_memcpy(sum.out + offset, padded, tail_bytes);
}

template <typename Element>
void sum_groups(const RowSum& sum) {
  constexpr std::size_t kVectorBytes = kLanes * Element::kElementBytes;
  std::size_t offset = 0;
  for (; offset + kGroupVectors * kVectorBytes <= sum.row_bytes; offset += kGroupVectors * kVectorBytes) {
    sum_group_block<Element, kGroupVectors>(sum, offset);
  }
  for (; offset + kVectorBytes <= sum.row_bytes; offset += kVectorBytes) sum_group_block<Element, 1>(sum, offset);
  if (offset < sum.row_bytes) sum_group_tail<Element>(sum, offset);
}

/// Sums the last elements, fewer than a vector, through a padded copy.
template <typename Element, bool kWeighted>
inline __attribute__((always_inline)) void sum_tail(const RowSum& sum, std::size_t offset) {
  constexpr std::size_t kVectorBytes = kLanes * Element::kElementBytes;
  const std::size_t tail_bytes = sum.row_bytes - offset;
  Floats acc = {};
  for (std::size_t row_idx = 0; row_idx < sum.num_rows; ++row_idx) {
    std::byte padded[kVectorBytes] = {};
    __builtin_memcpy(padded, sum.rows[row_idx] + offset, tail_bytes);
    const Floats values = Element::load(padded);
    acc = kWeighted ? multiply_add(sum.weights[row_idx], values, acc) : acc + values;
  }
  std::byte padded[kVectorBytes];
  Element::store(padded, acc);
  __builtin_memcpy(sum.out + offset, padded, tail_bytes);
}

template <typename Element, bool kWeighted>
void sum_rows_as(const RowSum& sum) {
  constexpr std::size_t kVectorBytes = kLanes * Element::kElementBytes;
  std::size_t offset = 0;
  for (; offset + kVectors * kVectorBytes <= sum.row_bytes; offset += kVectors * kVectorBytes) {
    sum_block<Element, kWeighted, kVectors>(sum, offset);
  }
  for (; offset + kVectorBytes <= sum.row_bytes; offset += kVectorBytes) sum_block<Element, kWeighted, 1>(sum, offset);
  if (offset < sum.row_bytes) sum_tail<Element, kWeighted>(sum, offset);
}

template <typename Element>
void sum_rows(const RowSum& sum) {
  if (sum.group_ends != nullptr) {
    sum_groups<Element>(sum);
  } else if (sum.weights != nullptr) {
    sum_rows_as<Element, true>(sum);
  } else {
    sum_rows_as<Element, false>(sum);
  }
}

}  // namespace
}  // namespace ferry::cpu

#endif  // FERRY_CPU_ROWS_ROW_SUM_KERNEL_HPP
