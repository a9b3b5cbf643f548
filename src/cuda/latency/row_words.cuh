#ifndef FERRY_CUDA_LATENCY_ROW_WORDS_CUH
#define FERRY_CUDA_LATENCY_ROW_WORDS_CUH

/// Rows of a combine that travel as words (window.hpp, "Row words"): a thread that has loaded a word of the call has
/// the word's half of data, and waits for nothing else.

#include <cstdint>

#include "cuda/latency/words.cuh"
#include "cuda/numeric/row_sum.cuh"
#include "cuda/sync/word_pair.cuh"

namespace ferry::cuda::device {

/// Address of the words of a row, from byte `begin` of the row on, the start of a warp's step. The row is of a token of
/// rank `at_rank`; `source` writes it in `set`.
__device__ inline std::byte* word_row(const LatencyParams& call, const CombineRows& rows, int at_rank, int set,
                                      int source, int token, int begin) {
  return window_of(call, at_rank).row_words(call.layout, call.ranks.num_ranks, set, source) +
         token * row_words_bytes(rows.row_bytes) + 2 * begin;
}

/// This lane's 16 bytes of a step, as four words.
struct LaneWords {
  static constexpr int kWords = 4;
  static constexpr int kHalfWords = kWarpLanes * 2;
  WordPair low;
  WordPair high;

  __device__ LaneWords() {}
  __device__ LaneWords(const uint4& value, std::uint64_t number)
      : low{make_word(number, value.x), make_word(number, value.y)},
        high{make_word(number, value.z), make_word(number, value.w)} {}

  /// `step`: address of the step's words.
  __device__ static LaneWords load(const std::byte* step) {
    const auto* const words = reinterpret_cast<const std::uint64_t*>(step) + 2 * lane_idx();
    LaneWords lane;
    lane.low = load_pair_relaxed_system(words);
    lane.high = load_pair_relaxed_system(words + kHalfWords);
    return lane;
  }
  __device__ void store(std::byte* step) const {
    auto* const words = reinterpret_cast<std::uint64_t*>(step) + 2 * lane_idx();
    store_pair_relaxed_system(words, low);
    store_pair_relaxed_system(words + kHalfWords, high);
  }
  /// Address of word `i` of this lane.
  __device__ static const std::uint64_t* address(const std::byte* step, int i) {
    return reinterpret_cast<const std::uint64_t*>(step) + 2 * lane_idx() + i / 2 * kHalfWords + i % 2;
  }
  __device__ bool are_of(std::uint64_t number) const {
    const std::uint64_t half = half_of(number);
    return low.first >> 32 == half && low.second >> 32 == half && high.first >> 32 == half && high.second >> 32 == half;
  }
  __device__ uint4 value() const {
    return make_uint4(payload_of(low.first), payload_of(low.second), payload_of(high.first), payload_of(high.second));
  }
};

/// Rows whose words a warp loads at once.
inline constexpr int kWordRows = 2;

/// Waits for this lane's words of a step of `num_rows` rows; false when the group broke. Not inlined, like poll_word.
__device__ __noinline__ inline bool await_word_rows(const LatencyParams& call, const SentCall& sent,
                                                    const std::byte* const* rows, int num_rows, int step) {
  const std::byte* const begin =
      own_window(call).row_words(call.layout, call.ranks.num_ranks, static_cast<int>(sent.set), 0);
  bool came = true;
#pragma unroll 1
  for (int i = 0; i < num_rows * LaneWords::kWords && came; ++i) {
    const std::byte* const words = rows[i / LaneWords::kWords] + 2 * step;
    const auto source = static_cast<unsigned>(words - begin) / static_cast<unsigned>(call.layout.row_words_bytes);
    came = wait_payload(call, {Awaited::kRow, static_cast<int>(source), sent.number},
                        LaneWords::address(words, i % LaneWords::kWords))
               .came;
  }
  return came;
}

/// out[0, bytes) = the sum of rows of this rank's row words in turn, each counted once, added as they arrive.
/// `terms.rows`: word_row() of each. False when the group broke. All lanes of a warp; afterwards `terms` may be filled
/// again.
template <bool kFloat32>
__device__ __noinline__ inline bool sum_word_rows(const LatencyParams& call, const SentCall& sent, const Terms& terms,
                                                  int num_rows, std::byte* out, int bytes) {
  constexpr int kLaneBytes = sizeof(uint4);
  constexpr int kStepBytes = kWarpLanes * kLaneBytes;
  constexpr int kLooks = 64;  // together less than a microsecond; the deadline starts later
  static_assert(kStepBytes == kWordStepBytes);
  const int most_looks = call.counts_waits ? 1 : kLooks;  // looks are not counted as waits
  const std::uint64_t number = sent.number;
  bool came = true;
#pragma unroll 1
  for (int step = 0; step < bytes && came; step += kStepBytes) {
    const int offset = step + lane_idx() * kLaneBytes;
    if (offset >= bytes) break;
    Vector<kFloat32> sum;
    sum.clear();
#pragma unroll 1
    for (int first = 0; first < num_rows && came; first += kWordRows) {
      LaneWords rows[kWordRows];
      bool all = false;
#pragma unroll 1
      for (int looks = 0; !all; ++looks) {
        if (looks == most_looks) {
          const int group = num_rows - first < kWordRows ? num_rows - first : kWordRows;
          came = await_word_rows(call, sent, terms.rows + first, group, step);
          if (!came) break;
          looks = 0;
        }
        all = true;
#pragma unroll
        for (int row = 0; row < kWordRows; ++row) {
          if (first + row < num_rows) rows[row] = LaneWords::load(terms.rows[first + row] + 2 * step);
        }
#pragma unroll
        for (int row = 0; row < kWordRows; ++row) {
          all = all && (first + row >= num_rows || rows[row].are_of(number));
        }
      }
#pragma unroll
      for (int row = 0; row < kWordRows; ++row) {
        if (first + row < num_rows) sum.add(rows[row].value(), 1.0F);
      }
    }
    *reinterpret_cast<uint4*>(out + offset) = sum.round();
  }
  return __all_sync(kAllLanes, static_cast<int>(came)) != 0;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_ROW_WORDS_CUH
