#ifndef FERRY_CUDA_LATENCY_TERM_ORDER_CUH
#define FERRY_CUDA_LATENCY_TERM_ORDER_CUH

/// Order of summation: sorts the entries of a token, one per lane of a warp, into the order in which their rows are
/// added.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/latency/far_message.hpp"
#include "cuda/latency/row_words.cuh"
#include "cuda/numeric/row_sum.cuh"

namespace ferry::cuda::device {

/// Key of an entry without a row.
inline constexpr std::uint64_t kNoTerm = UINT64_MAX;

/// An entry's term: `row` times `weight`. Entries of equal keys have the same row.
struct Term {
  std::uint64_t key = kNoTerm;
  const std::byte* row = nullptr;  ///< read only from the first lane of a key
  float weight = 1.0F;
};

/// Result of order_terms.
struct TermPlace {
  int num_rows = 0;
  int position = 0;  ///< position of this lane's weight
};

/// Fills `terms` in ascending order of (key, lane), each row once: with `weighted` it counts with the weights of all
/// its entries in turn, else once with 1. Only the first `num_entries` lanes have an entry. All lanes of a warp. One
/// copy of the code, as in sum_terms.
__device__ __noinline__ inline TermPlace order_terms(const Term& term, int num_entries, bool weighted, Terms& terms) {
  constexpr unsigned kLanes = 0xFFFFFFFFU;
  const int lane = lane_idx();
  int position = 0;
  bool first = true;
#pragma unroll 1
  for (int other = 0; other < num_entries; ++other) {
    const std::uint64_t key = __shfl_sync(kLanes, term.key, other);
    const bool before = other < lane && key == term.key;
    position += static_cast<int>(key < term.key || before);
    first = first && !before;
  }
  const bool counts = term.key != kNoTerm;
  first = first && counts;
  const unsigned first_positions = __reduce_or_sync(kLanes, first ? 1U << position : 0U);
  const int num_entries_left = __popc(__ballot_sync(kLanes, static_cast<int>(counts)));
  const int num_rows = __popc(first_positions);
  if (first) {
    const int row = __popc(first_positions & ((1U << position) - 1U));
    terms.rows[row] = term.row;
    terms.first_weight[row] = static_cast<std::uint8_t>(weighted ? position : row);
    if (!weighted) terms.weights[row] = 1.0F;
  }
  if (weighted && counts) terms.weights[position] = term.weight;
  if (lane == 0) terms.first_weight[num_rows] = static_cast<std::uint8_t>(weighted ? num_entries_left : num_rows);
  __syncwarp();
  return {num_rows, position};
}

/// Rows, and steps of a row 512 bytes apart, that a warp loads at once.
inline constexpr int kSumRows = 4;
inline constexpr int kSumSteps = 2;

/// Destination of a sum that travels as words of a call: word_row().
struct WordPlace {
  std::byte* words = nullptr;
  std::uint64_t number = 0;
};

/// The same for a rank of another node: words of whole lines.
struct FarWordPlace {
  std::byte* words = nullptr;
  std::uint64_t number = 0;
};

/// The same for a sum that travels as FP8, but not as words. Rows are whole blocks, so lanes behind the end of a row
/// share a block with no other lane.
struct Fp8Place {
  std::byte* row = nullptr;    ///< where the quantised row begins
  std::int64_t row_bytes = 0;  ///< of the bf16 row
  int begin = 0;               ///< bytes of the bf16 row before the part
};

/// Stores this lane's vectors of a sum, of which the first `num_vectors` exist. `begin`: offset in the sum of the first
/// lane's first vector.
template <bool kFloat32>
__device__ inline void store_sums(std::byte* out, int begin, const LaneSums<kFloat32, kSumSteps>& sums,
                                  int num_vectors) {
  sums.store(out + begin, num_vectors);
}
template <bool kFloat32>
__device__ inline void store_sums(const WordPlace& out, int begin, const LaneSums<kFloat32, kWordStepVectors>& sums,
                                  int num_vectors) {
  sums.words(out.number).store(out.words + word_offset(begin, kWordStepVectors), num_vectors);
}

template <bool kFloat32>
__device__ inline void store_sums(const FarWordPlace& out, int begin, const LaneSums<kFloat32, kFarStepVectors>& sums,
                                  int num_vectors) {
  sums.words(out.number).store(out.words + word_offset(begin, kFarStepVectors), num_vectors);
}

/// In fp8_sums.cuh.
__device__ void store_sums(const Fp8Place& out, int begin, const LaneSums<false, kFp8StepVectors>& sums,
                           int num_vectors);

/// out[0, bytes) = the sum of the terms. All lanes of a warp; afterwards `terms` may be filled again. Both halves of a
/// call use this one copy of the code, so the second finds it in the instruction cache. `Out`: std::byte*, WordPlace,
/// FarWordPlace or Fp8Place.
template <bool kFloat32, typename Out>
__device__ __noinline__ inline void sum_terms(const Terms& terms, int num_rows, Out out, int bytes) {
  constexpr bool kFar = std::is_same_v<Out, FarWordPlace>;
  constexpr bool kFp8 = std::is_same_v<Out, Fp8Place>;
  constexpr int kSteps = kFar                             ? kFarStepVectors
                         : std::is_same_v<Out, WordPlace> ? kWordStepVectors
                         : kFp8                           ? kFp8StepVectors
                                                          : kSumSteps;
  constexpr int kRows = kFp8 ? kSumRows / 2 : kSumRows;  // for as many loads under way
#pragma unroll 1
  for (int begin = 0; begin < bytes; begin += kSteps * kLineBytes) {
    LaneSums<kFloat32, kSteps> sums;
    sums.clear();
    const int num_vectors = count_vectors<kSteps>(bytes - begin);
    if (!kFar && !kFp8 && num_vectors == 0) break;
#pragma unroll 1
    for (int first = 0; first < num_rows; first += kRows) {
      uint4 values[kRows][kSteps];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (first + row >= num_rows) continue;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          if (step < num_vectors) {
            values[row][step] = load_row(terms.rows[first + row] + begin + vector_offset(step));
          }
        }
      }
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (first + row >= num_rows) continue;
        const int end = terms.first_weight[first + row + 1];
#pragma unroll 1
        for (int i = terms.first_weight[first + row]; i < end; ++i) {
          const float weight = terms.weights[i];
#pragma unroll
          for (int step = 0; step < kSteps; ++step) sums.vectors[step].add(values[row][step], weight);
        }
      }
    }
    if constexpr (kFar) {
      store_sums(out, begin, sums, count_line_vectors<kSteps>(bytes - begin));
    } else {
      store_sums(out, begin, sums, num_vectors);
    }
  }
  __syncwarp();
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_TERM_ORDER_CUH
