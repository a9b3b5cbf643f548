#ifndef FERRY_CUDA_INTRANODE_COMBINE_SUM_BULK_CUH
#define FERRY_CUDA_INTRANODE_COMBINE_SUM_BULK_CUH

/// Summing by the bulk copy engine: a warp's rows land in shared memory while it adds up others. A set is the same
/// piece of the rows of a token, the shorter the more rows there are. Few multiprocessors then hold enough bytes in
/// flight to fill the links: what comes over them waits several microseconds, so shared memory is what bounds the pace,
/// and the row that is on this GPU takes none of it.

#include "cuda/copy/bulk_copy.cuh"
#include "cuda/copy/warp_copy.cuh"
#include "cuda/intranode/combine_terms.cuh"

namespace ferry::cuda::device {

inline constexpr int kSumSets = 2;
/// Tokens between being found and being summed: one per set that lands, and the next one.
inline constexpr int kSumTokens = kSumSets + 1;
inline constexpr int kSetBytes = 8192;
inline constexpr std::uint32_t kVectorBytes = sizeof(uint4);
/// A line of the second-level cache.
inline constexpr std::uint32_t kLineBytes = 128;
inline constexpr std::uint32_t kStepBytes = kWarpLanes * kVectorBytes;
/// Sets of up to so many rows are added with all rows of a step in registers.
inline constexpr int kOneRow = 1;
inline constexpr int kTwoRows = 2;
inline constexpr int kFewRows = 4;
inline constexpr int kManyRows = 8;
/// Tokens of more rows are rare.
inline constexpr int kMostRows = 64;
static_assert(kMostRows >= kMaxTerms);
static_assert(kSetBytes / kMostRows % kLandingBytes == 0, "every piece of a set begins at a good destination");

/// Longest part of a row that is one warp's work where warps have few tokens each: with longer ones, those that have
/// one less wait too long for those that have one more. Where they have many, finding a row's terms for every part
/// costs more than that.
inline constexpr std::int64_t kPartBytes = 8192;
inline constexpr std::int64_t kManyTokens = 8;

/// A warp's unit of work: part `part` of `num_parts` of a token's row.
struct SumItem {
  int token = -1;
  int part = 0;
  int num_parts = 1;
};

/// A walk over the sets of an item.
struct SetCursor {
  int token = -1;    ///< -1: no more
  int num_rows = 0;  ///< of a set: the token's but for the near one
  int near_row = kNoRow;
  int room = kOneRow;  ///< rows that a set of this token has room for
  int piece = 0;
  int end_piece = 0;

  __device__ static SetCursor of(const SumItem& item, const Terms& terms, std::int64_t row_bytes) {
    SetCursor cursor;
    cursor.token = item.token;
    cursor.near_row = terms.near_row;
    cursor.num_rows = terms.num_rows - (terms.near_row != kNoRow ? 1 : 0);
    while (cursor.room < cursor.num_rows) cursor.room *= 2;
    const int bytes = cursor.piece_bytes();
    const auto num_pieces = static_cast<int>((row_bytes + bytes - 1) / bytes);
    cursor.piece = num_pieces * item.part / item.num_parts;
    cursor.end_piece = num_pieces * (item.part + 1) / item.num_parts;
    return cursor;
  }

  /// Which of the token's rows row `idx` of a set is.
  __device__ int row_of(int idx) const { return idx < near_row ? idx : idx + 1; }
  __device__ int piece_bytes() const { return kSetBytes / room; }
  /// False behind the last set.
  __device__ bool advance() { return ++piece < end_piece; }
  __device__ std::int64_t offset() const { return static_cast<std::int64_t>(piece) * piece_bytes(); }
  __device__ std::uint32_t bytes(std::int64_t row_bytes) const {
    const std::int64_t left = row_bytes - offset();
    return static_cast<std::uint32_t>(left < piece_bytes() ? left : piece_bytes());
  }
};

/// One warp's shared memory.
struct SumStages {
  std::byte* sets;  ///< [kSumSets, kSetBytes]
  std::uint64_t* barriers;
  Terms* terms;  ///< [kSumTokens]
};

template <bool kFloat32>
class BulkSummer {
 public:
  __device__ BulkSummer(const CombineParams& params, const TermFinder& finder, const SumStages& stages, int first,
                        int step)
      : params_(params),
        finder_(finder),
        stages_(stages),
        num_parts_(parts_of(params, step)),
        next_item_(num_parts_, first, step) {
    next_destination_ = finder.load_destination(next_item_.idx());
  }

  __device__ void run() {
    begin_item(loading_, loading_terms_);
    using_ = loading_;
    for (int set = 0; set < kSumSets; ++set) load(set);
    while (using_.token >= 0) {
      for (int set = 0; set < kSumSets && using_.token >= 0; ++set) {
        add(set);
        load(set);
      }
    }
  }

 private:
  __device__ static int parts_of(const CombineParams& params, int num_warps) {
    if (params.num_tokens >= num_warps * kManyTokens) return 1;
    const auto parts = static_cast<int>((params.row_bytes + kPartBytes - 1) / kPartBytes);
    return parts < 1 ? 1 : parts;
  }

  /// Finds the next item's terms. All lanes.
  __device__ void begin_item(SetCursor& cursor, int terms_idx) {
    cursor = {};
    const SumItem item{next_item_.idx(), next_item_.rank(), num_parts_};
    if (item.token >= params_.num_tokens || broken_) return;
    Terms& terms = stages_.terms[terms_idx];
    // Loaded ahead of their use, so that no lane waits for them.
    const Destination destination = next_destination_;
    next_item_.advance();
    next_destination_ = finder_.load_destination(next_item_.idx());
    const int num_rows = finder_.find(item.token, destination, terms);
    if (num_rows < 0) {
      broken_ = true;
      return;
    }
    if (item.part == 0) finder_.return_weights(item.token, destination);
    if (lane_idx() == 0) {
      terms.num_rows = num_rows;
      terms.token = item.token;
      terms.part = item.part;
    }
    __syncwarp();
    cursor = SetCursor::of(item, terms, params_.row_bytes);
  }

  /// Starts the next set. All lanes.
  __device__ void load(int set) {
    if (loading_.token < 0) return;
    const Terms& terms = stages_.terms[loading_terms_];
    std::uint64_t* barrier = stages_.barriers + set;
    std::byte* to = stages_.sets + set * kSetBytes;
    const int piece_bytes = loading_.piece_bytes();
    const std::uint32_t bytes = loading_.bytes(params_.row_bytes);
    if (lane_idx() == 0) expect_loads(barrier, bytes * static_cast<std::uint32_t>(loading_.num_rows));
    __syncwarp();
    for (int idx = lane_idx(); idx < loading_.num_rows; idx += kWarpLanes) {
      start_load(to + idx * piece_bytes, terms.rows[loading_.row_of(idx)] + loading_.offset(), bytes, barrier);
    }
    if (loading_.near_row != kNoRow) {
      const std::byte* near = terms.rows[loading_.near_row] + loading_.offset();
      for (auto at = static_cast<std::uint32_t>(lane_idx()) * kLineBytes; at < bytes; at += kWarpLanes * kLineBytes) {
        prefetch_l2(near + at);
      }
    }
    if (loading_.advance()) return;
    loading_terms_ = (loading_terms_ + 1) % kSumTokens;
    begin_item(loading_, loading_terms_);
  }

  /// Adds a set up and writes the sum. All lanes.
  __device__ void add(int set) {
    wait_barrier(stages_.barriers + set, parities_ >> set & 1U);
    parities_ ^= 1U << set;
    if (using_.room == kOneRow) {
      add_rows<kOneRow>(set);
    } else if (using_.room == kTwoRows) {
      add_rows<kTwoRows>(set);
    } else if (using_.room == kFewRows) {
      add_rows<kFewRows>(set);
    } else if (using_.room == kManyRows) {
      add_rows<kManyRows>(set);
    } else {
      add_any_rows(set);
    }
    __syncwarp();
    if (using_.advance()) return;
    using_terms_ = (using_terms_ + 1) % kSumTokens;
    using_ = {};
    // The next item is being loaded already, or there is none.
    if (using_terms_ == loading_terms_ && loading_.token < 0) return;
    const Terms& terms = stages_.terms[using_terms_];
    using_ = SetCursor::of({terms.token, terms.part, num_parts_}, terms, params_.row_bytes);
  }

  __device__ void write(const Vector<kFloat32>& sum, std::uint32_t at) const {
    std::byte* out = params_.out_x + using_.token * params_.out_stride + using_.offset() + at;
    *reinterpret_cast<uint4*>(out) = sum.round();
  }

  /// 16 bytes of the near row for this lane, `at` bytes into the piece.
  __device__ static uint4 load_near(const std::byte* near, std::uint32_t at, std::uint32_t bytes) {
    return near != nullptr && at < bytes ? *reinterpret_cast<const uint4*>(near + at) : uint4{};
  }

  /// Null where the token has none.
  __device__ const std::byte* near_piece(const Terms& terms) const {
    return using_.near_row == kNoRow ? nullptr : terms.rows[using_.near_row] + using_.offset();
  }

  template <int kRows>
  __device__ void add_rows(int set) const {
    constexpr int kSteps = kSetBytes / kRows / kStepBytes;
    const Terms& terms = stages_.terms[using_terms_];
    const std::byte* base = stages_.sets + set * kSetBytes + lane_idx() * static_cast<int>(kVectorBytes);
    const std::uint32_t bytes = using_.bytes(params_.row_bytes);
    const int num_rows = using_.num_rows;
    const int near_row = using_.near_row;
    const std::byte* near = near_piece(terms);
    // Mostly a row counts once: then its weight waits in a register.
    const bool once = terms.num_weights == terms.num_rows;
    float weights[kRows];
#pragma unroll
    for (int idx = 0; idx < kRows; ++idx) weights[idx] = idx < num_rows ? terms.weights[using_.row_of(idx)] : 0.0F;
    const float near_weight = near != nullptr ? terms.weights[near_row] : 0.0F;
    const auto add = [&terms, once](int row, const uint4& raw, float weight, Vector<kFloat32>& sum) {
      if (once) {
        sum.add(raw, weight);
      } else {
        add_weights(terms, row, raw, sum);
      }
    };
    const std::uint32_t first = static_cast<std::uint32_t>(lane_idx()) * kVectorBytes;
    // Some steps ahead of its use, as registers allow: it comes from the second-level cache.
    constexpr int kAhead = kRows <= kTwoRows ? 4 : 1;
    uint4 ahead[kAhead];
#pragma unroll
    for (int step = 0; step < kAhead; ++step) ahead[step] = load_near(near, first + step * kStepBytes, bytes);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::uint32_t at = step * kStepBytes + first;
      if (at >= bytes) break;
      const uint4 near_now = ahead[step % kAhead];
      ahead[step % kAhead] = load_near(near, at + kAhead * kStepBytes, bytes);
      uint4 raw[kRows];
#pragma unroll
      for (int idx = 0; idx < kRows; ++idx) {
        if (idx < num_rows) {
          raw[idx] = *reinterpret_cast<const uint4*>(base + idx * (kSetBytes / kRows) + step * kStepBytes);
        }
      }
      Vector<kFloat32> sum;
      sum.clear();
#pragma unroll
      for (int idx = 0; idx < kRows; ++idx) {
        if (idx == near_row) add(near_row, near_now, near_weight, sum);
        if (idx < num_rows) add(using_.row_of(idx), raw[idx], weights[idx], sum);
      }
      if (near_row == kRows) add(near_row, near_now, near_weight, sum);
      write(sum, at);
    }
  }

  __device__ void add_any_rows(int set) const {
    const Terms& terms = stages_.terms[using_terms_];
    const std::byte* base = stages_.sets + set * kSetBytes;
    const std::byte* near = near_piece(terms);
    const std::uint32_t bytes = using_.bytes(params_.row_bytes);
    for (auto at = static_cast<std::uint32_t>(lane_idx()) * kVectorBytes; at < bytes; at += kStepBytes) {
      Vector<kFloat32> sum;
      sum.clear();
#pragma unroll 1
      for (int idx = 0; idx <= using_.num_rows; ++idx) {
        if (idx == using_.near_row) add_weights(terms, idx, load_near(near, at, bytes), sum);
        if (idx == using_.num_rows) break;
        add_weights(terms, using_.row_of(idx), *reinterpret_cast<const uint4*>(base + idx * using_.piece_bytes() + at),
                    sum);
      }
      write(sum, at);
    }
  }

  /// A row that several of the token's entries share counts with each of their weights.
  __device__ static void add_weights(const Terms& terms, int row, const uint4& raw, Vector<kFloat32>& sum) {
#pragma unroll 1
    for (int i = terms.first_weight[row]; i < terms.first_weight[row + 1]; ++i) sum.add(raw, terms.weights[i]);
  }

  const CombineParams& params_;
  const TermFinder& finder_;
  SumStages stages_;
  int num_parts_;
  RankWalk next_item_;  // of the parts of tokens, dealt as if parts were ranks
  bool broken_ = false;
  Destination next_destination_;
  SetCursor loading_;
  SetCursor using_;
  int loading_terms_ = 0;
  int using_terms_ = 0;
  std::uint32_t parities_ = 0;
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_COMBINE_SUM_BULK_CUH
