#ifndef FERRY_CUDA_LATENCY_ROW_WORDS_CUH
#define FERRY_CUDA_LATENCY_ROW_WORDS_CUH

/// Rows of a combine that travel as words (window.hpp, "Row words"): a thread that has loaded a word of the call has
/// the word's data, and waits for nothing else.

#include <cstdint>

#include "cuda/latency/far_message.hpp"
#include "cuda/latency/words.cuh"
#include "cuda/numeric/row_sum.cuh"
#include "cuda/sync/wide_word.cuh"

namespace ferry::cuda::device {

/// Address of the words of a row, from byte `begin` of the row on, the start of a warp's step. The row is of a token of
/// rank `at_rank`; `source` writes it in `set`. In steps of kWordStepVectors.
__device__ inline std::byte* word_row(const LatencyParams& call, const CombineRows& rows, int at_rank, int set,
                                      int source, int token, int begin) {
  return window_of(call, at_rank).row_words(call.layout, call.ranks.num_ranks, set, source) +
         token * row_words_bytes(rows.row_bytes, kWordStepVectors) + word_offset(begin, kWordStepVectors);
}

/// A lane's vectors of a step, as many as lie in the first bytes of it, each 512 bytes behind the last.
inline constexpr int kLineBytes = kWarpLanes * static_cast<int>(sizeof(uint4));
static_assert(kLineBytes == kWordLineBytes);

/// Offset of this lane's vector in a step.
__device__ inline int vector_offset(int vector) {
  return vector * kLineBytes + lane_idx() * static_cast<int>(sizeof(uint4));
}
/// Number of this lane's vectors in the first `bytes` bytes of a step, at most `kMost`.
template <int kMost>
__device__ inline int count_vectors(int bytes) {
  int num_vectors = 0;
#pragma unroll
  for (int vector = 0; vector < kMost; ++vector) num_vectors += static_cast<int>(vector_offset(vector) < bytes);
  return num_vectors;
}

/// The same of every lane, where rows are padded to whole lines (far_row_words_bytes()).
template <int kMost>
__device__ inline int count_line_vectors(int bytes) {
  return min(kMost, (bytes + kLineBytes - 1) / kLineBytes);
}

/// A lane's vectors of a step as words. Each word has three quarters of a vector, and then its call's number; quarters
/// behind the last vector have the number too, or with `kScaled` the bits of a scale.
template <int kVectors, bool kScaled = false>
class LaneWords {
 public:
  static constexpr int kWords = kVectors + 1;
  static_assert(!kScaled || 4 * kVectors + 1 == 3 * kWords, "one quarter is left");

  __device__ LaneWords() {}
  __device__ LaneWords(const uint4 (&values)[kVectors], std::uint64_t number)
      : LaneWords(values, number, static_cast<std::uint32_t>(half_of(number))) {}
  __device__ LaneWords(const uint4 (&values)[kVectors], std::uint64_t number, std::uint32_t behind) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const std::uint64_t second = quarter(values, 3 * i + 1, behind);
      words_[i] = {second << 32 | quarter(values, 3 * i, behind),
                   make_word(number, quarter(values, 3 * i + 2, behind))};
    }
  }

  /// Number of words that hold the first vectors.
  __device__ static int count(int num_vectors) { return num_vectors == 0 ? 0 : num_vectors + 1; }
  /// `step`: address of the step's words.
  __device__ static LaneWords load(const std::byte* step, int num_vectors) {
    LaneWords lane;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (i < count(num_vectors)) lane.words_[i] = load_wide_relaxed_system(at(step, i));
    }
    return lane;
  }
  __device__ void store(std::byte* step, int num_vectors) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (i < count(num_vectors)) store_wide_relaxed_system(const_cast<WideWord*>(at(step, i)), words_[i]);
    }
  }
  /// Half of a word, the half that has the number.
  __device__ static const std::uint64_t* number_of(const std::byte* step, int i) { return &at(step, i)->high; }
  /// Looks at all 16 bytes of each word, as load_wide_relaxed_system asks for: at data when it is used.
  __device__ bool are_of(std::uint64_t number, int num_vectors) const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (i >= count(num_vectors)) continue;
      all = all && is_word_of(words_[i].high, number);
#pragma unroll
      for (int part = 3 * i; part < 3 * i + 3; ++part) {
        if (!kScaled && part >= 4 * kVectors) all = all && quarter(part) == static_cast<std::uint32_t>(half_of(number));
      }
    }
    return all;
  }
  __device__ const WideWord& word(int i) const { return words_[i]; }
  /// With kScaled: the bits of the scale.
  __device__ std::uint32_t last_quarter() const { return quarter(4 * kVectors); }
  /// `vector` is known to the compiler.
  __device__ uint4 value(int vector) const {
    return make_uint4(quarter(4 * vector), quarter(4 * vector + 1), quarter(4 * vector + 2), quarter(4 * vector + 3));
  }

 private:
  __device__ static const WideWord* at(const std::byte* step, int i) {
    return reinterpret_cast<const WideWord*>(step) + i * kWarpLanes + lane_idx();
  }
  /// Quarter `i` of all vectors; `behind` behind the last.
  __device__ static std::uint32_t quarter(const uint4 (&values)[kVectors], int i, std::uint32_t behind) {
    if (i >= 4 * kVectors) return behind;
    const uint4& value = values[i / 4];
    return i % 4 == 0 ? value.x : i % 4 == 1 ? value.y : i % 4 == 2 ? value.z : value.w;
  }
  __device__ std::uint32_t quarter(int i) const {
    const WideWord& word = words_[i / 3];
    return i % 3 == 2 ? payload_of(word.high) : static_cast<std::uint32_t>(word.low >> (i % 3 * 32));
  }

  WideWord words_[kWords];
};

/// Waits for this lane's words of a step of kFarStepVectors; false when the group broke. Not inlined, like poll_word.
__device__ __noinline__ inline bool await_step(const LatencyParams& call, const Wait& wait, const std::byte* step,
                                               int num_vectors) {
  using Words = LaneWords<kFarStepVectors>;
  bool came = true;
#pragma unroll 1
  for (int i = 0; i < Words::count(num_vectors) && came; ++i) {
    came = wait_payload(call, wait, Words::number_of(step, i)).came;
  }
  return came;
}

/// Stores bytes [begin, begin + num_bytes) of a row as words of whole lines. `words`, `row`: from byte 0 on; `begin` is
/// the start of a step. All lanes of a warp.
__device__ inline void store_as_words(std::byte* words, std::uint64_t number, const std::byte* row, int begin,
                                      int num_bytes) {
  constexpr int kVectors = kFarStepVectors;
  const int end = begin + num_bytes;
#pragma unroll 1
  for (; begin < end; begin += kVectors * kLineBytes) {
    const int num_vectors = count_vectors<kVectors>(end - begin);
    uint4 values[kVectors] = {};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (i < num_vectors) values[i] = *reinterpret_cast<const uint4*>(row + begin + vector_offset(i));
    }
    LaneWords<kVectors>(values, number)
        .store(words + word_offset(begin, kVectors), count_line_vectors<kVectors>(end - begin));
  }
}

/// Sums of a lane's vectors of a step.
template <bool kFloat32, int kVectors>
struct LaneSums {
  Vector<kFloat32> vectors[kVectors];

  __device__ void clear() {
#pragma unroll
    for (Vector<kFloat32>& vector : vectors) vector.clear();
  }
  /// Adds a row that counts once.
  __device__ void add(const LaneWords<kVectors>& row, int num_vectors) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (i < num_vectors) vectors[i].add(row.value(i), 1.0F);
    }
  }
  /// `out`: the step's place in the row that is summed.
  __device__ void store(std::byte* out, int num_vectors) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (i < num_vectors) *reinterpret_cast<uint4*>(out + vector_offset(i)) = vectors[i].round();
    }
  }
  __device__ LaneWords<kVectors> words(std::uint64_t number) const {
    uint4 values[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) values[i] = vectors[i].round();
    return LaneWords<kVectors>(values, number);
  }
};

/// Sums that ranks return for a token, as words.
struct RankSums {
  const std::byte* const* rows;  ///< words of each, from byte 0 on
  unsigned ranks;                ///< that return one, one bit each; ascending, as `rows`
  unsigned ends;                 ///< the last of each node
};

/// Rows whose words a warp loads at once.
inline constexpr int kWordRows = 2;

/// Waits for this lane's words of a step of `num_rows` rows; false when the group broke. Not inlined, like poll_word.
template <int kVectors>
__device__ __noinline__ inline bool await_word_rows(const LatencyParams& call, const SentCall& sent,
                                                    const std::byte* const* rows, int num_rows, int step,
                                                    int num_vectors) {
  using Words = LaneWords<kVectors>;
  const std::byte* const begin =
      own_window(call).row_words(call.layout, call.ranks.num_ranks, static_cast<int>(sent.set), 0);
  bool came = true;
#pragma unroll 1
  for (int i = 0; i < num_rows * Words::kWords && came; ++i) {
    if (i % Words::kWords >= Words::count(num_vectors)) continue;
    const std::byte* const words = rows[i / Words::kWords] + word_offset(step, kVectors);
    const auto source = static_cast<unsigned>(words - begin) / static_cast<unsigned>(call.layout.row_words_bytes);
    came = wait_payload(call, {Awaited::kRow, static_cast<int>(source), sent.number},
                        Words::number_of(words, i % Words::kWords))
               .came;
  }
  return came;
}

/// Waits for this lane's words of a step of at most kWordRows rows, and adds them; false when the group broke.
template <bool kFloat32, int kVectors>
__device__ inline bool add_word_rows(const LatencyParams& call, const SentCall& sent, const std::byte* const* rows,
                                     int num_rows, int step, int num_vectors, LaneSums<kFloat32, kVectors>& sums) {
  const int most_looks = call.counts_waits ? 1 : kWordLooks;  // looks are not counted as waits
  LaneWords<kVectors> words[kWordRows];
#pragma unroll 1
  for (int looks = 0;; ++looks) {
    if (looks == most_looks) {
      const int group = num_rows < kWordRows ? num_rows : kWordRows;
      if (!await_word_rows<kVectors>(call, sent, rows, group, step, num_vectors)) return false;
      looks = 0;
    }
#pragma unroll
    for (int row = 0; row < kWordRows; ++row) {
      if (row >= num_rows) continue;
      words[row] = LaneWords<kVectors>::load(rows[row] + word_offset(step, kVectors), num_vectors);
    }
    bool all = true;
#pragma unroll
    for (int row = 0; row < kWordRows; ++row) {
      all = all && (row >= num_rows || words[row].are_of(sent.number, num_vectors));
    }
    if (all) break;
  }
#pragma unroll
  for (int row = 0; row < kWordRows; ++row) {
    if (row < num_rows) sums.add(words[row], num_vectors);
  }
  return true;
}

/// out[begin, end) = the sum of rows of this rank's row words in turn, each counted once, added as they arrive. `rows`:
/// words of each, from byte 0 on; `begin` is the start of a step. False when the group broke. All lanes of a warp.
template <bool kFloat32, int kVectors>
__device__ inline bool sum_word_steps(const LatencyParams& call, const SentCall& sent, const std::byte* const* rows,
                                      int num_rows, std::byte* out, int begin, int end) {
  bool came = true;
#pragma unroll 1
  for (int step = begin; step < end && came; step += kVectors * kLineBytes) {
    const int num_vectors = count_vectors<kVectors>(end - step);
    LaneSums<kFloat32, kVectors> sums;
    sums.clear();
#pragma unroll 1
    for (int first = 0; first < num_rows && num_vectors > 0 && came; first += kWordRows) {
      came = add_word_rows(call, sent, rows + first, num_rows - first, step, num_vectors, sums);
    }
    if (came) sums.store(out + step, num_vectors);
  }
  return __all_sync(kAllLanes, static_cast<int>(came)) != 0;
}

/// The same for the rows of `terms`, which may be filled again afterwards. One copy of the code, as in sum_terms.
template <bool kFloat32>
__device__ __noinline__ inline bool sum_word_rows(const LatencyParams& call, const SentCall& sent, const Terms& terms,
                                                  int num_rows, std::byte* out, int bytes) {
  return sum_word_steps<kFloat32, kWordStepVectors>(call, sent, terms.rows, num_rows, out, 0, bytes);
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_ROW_WORDS_CUH
