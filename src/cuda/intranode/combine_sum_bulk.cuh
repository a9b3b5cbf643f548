#ifndef FERRY_CUDA_INTRANODE_COMBINE_SUM_BULK_CUH
#define FERRY_CUDA_INTRANODE_COMBINE_SUM_BULK_CUH

/// Summing by the bulk copy engine: a warp's rows land in shared memory while it adds up others. A set is the same
/// piece of the rows of a token, the shorter the more rows there are. Few multiprocessors then hold enough bytes in
/// flight to fill the links, if adding keeps up with them: its loops are short, because code that a multiprocessor's
/// instruction cache cannot hold runs several times slower.

#include "cuda/copy/bulk_copy.cuh"
#include "cuda/intranode/combine_terms.cuh"

namespace ferry::cuda::device {

inline constexpr int kSumSets = 2;
/// Tokens between being found and being summed: one per set that lands, and the next one.
inline constexpr int kSumTokens = kSumSets + 1;
inline constexpr int kSetBytes = 8192;
inline constexpr std::uint32_t kVectorBytes = sizeof(uint4);
inline constexpr std::uint32_t kStepBytes = kWarpLanes * kVectorBytes;
/// Sets of up to so many rows are added with all rows of a step in registers.
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
  int token = -1;  ///< -1: no more
  int num_rows = 0;
  int room = kTwoRows;  ///< rows that a set of this token has room for
  int piece = 0;
  int end_piece = 0;

  __device__ static SetCursor of(const SumItem& item, int num_rows, std::int64_t row_bytes) {
    SetCursor cursor;
    cursor.token = item.token;
    cursor.num_rows = num_rows;
    while (cursor.room < cursor.num_rows) cursor.room *= 2;
    const int bytes = cursor.piece_bytes();
    const std::int64_t num_pieces = (row_bytes + bytes - 1) / bytes;
    cursor.piece = static_cast<int>(num_pieces * item.part / item.num_parts);
    cursor.end_piece = static_cast<int>(num_pieces * (item.part + 1) / item.num_parts);
    return cursor;
  }

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
#pragma unroll 1
    for (int set = 0; set < kSumSets; ++set) load(set);
#pragma unroll 1
    for (int set = 0; using_.token >= 0; set = set + 1 == kSumSets ? 0 : set + 1) {
      add(set);
      load(set);
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
    const SumItem item{next_item_.idx(), next_item_.owner(), num_parts_};
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
    cursor = SetCursor::of(item, num_rows, params_.row_bytes);
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
    for (int row = lane_idx(); row < loading_.num_rows; row += kWarpLanes) {
      start_load(to + row * piece_bytes, terms.rows[row] + loading_.offset(), bytes, barrier);
    }
    if (loading_.advance()) return;
    loading_terms_ = (loading_terms_ + 1) % kSumTokens;
    begin_item(loading_, loading_terms_);
  }

  /// Adds a set up and writes the sum. All lanes.
  __device__ void add(int set) {
    wait_barrier(stages_.barriers + set, parities_ >> set & 1U);
    parities_ ^= 1U << set;
    const Terms& terms = stages_.terms[using_terms_];
    // Mostly a row counts once.
    if (using_.room > kManyRows || terms.num_weights != terms.num_rows) {
      add_any_rows(set);
    } else if (using_.room == kTwoRows) {
      add_rows<kTwoRows>(set);
    } else if (using_.room == kFewRows) {
      add_rows<kFewRows>(set);
    } else {
      add_rows<kManyRows>(set);
    }
    __syncwarp();
    if (using_.advance()) return;
    using_terms_ = (using_terms_ + 1) % kSumTokens;
    using_ = {};
    // The next item is being loaded already, or there is none.
    if (using_terms_ == loading_terms_ && loading_.token < 0) return;
    const Terms& next = stages_.terms[using_terms_];
    using_ = SetCursor::of({next.token, next.part, num_parts_}, next.num_rows, params_.row_bytes);
  }

  __device__ void write(const Vector<kFloat32>& sum, std::uint32_t at) const {
    std::byte* out = params_.out_x + using_.token * params_.out_stride + using_.offset() + at;
    *reinterpret_cast<uint4*>(out) = sum.round();
  }

  /// Each of up to `kRows` rows counts with one weight.
  template <int kRows>
  __device__ void add_rows(int set) const {
    const Terms& terms = stages_.terms[using_terms_];
    const std::byte* base = stages_.sets + set * kSetBytes;
    const std::uint32_t bytes = using_.bytes(params_.row_bytes);
    const int num_rows = using_.num_rows;
    float weights[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) weights[row] = row < num_rows ? terms.weights[row] : 0.0F;
#pragma unroll 1
    for (auto at = static_cast<std::uint32_t>(lane_idx()) * kVectorBytes; at < bytes; at += kStepBytes) {
      uint4 raw[kRows];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (row < num_rows) raw[row] = *reinterpret_cast<const uint4*>(base + row * (kSetBytes / kRows) + at);
      }
      Vector<kFloat32> sum;
      sum.clear();
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (row < num_rows) sum.add(raw[row], weights[row]);
      }
      write(sum, at);
    }
  }

  /// Any number of rows, which several of the token's entries may share: such a row counts with each of their weights.
  __device__ void add_any_rows(int set) const {
    const Terms& terms = stages_.terms[using_terms_];
    const std::byte* base = stages_.sets + set * kSetBytes;
    const std::uint32_t bytes = using_.bytes(params_.row_bytes);
#pragma unroll 1
    for (auto at = static_cast<std::uint32_t>(lane_idx()) * kVectorBytes; at < bytes; at += kStepBytes) {
      Vector<kFloat32> sum;
      sum.clear();
#pragma unroll 1
      for (int row = 0; row < using_.num_rows; ++row) {
        const uint4 raw = *reinterpret_cast<const uint4*>(base + row * using_.piece_bytes() + at);
#pragma unroll 1
        for (int i = terms.first_weight[row]; i < terms.first_weight[row + 1]; ++i) sum.add(raw, terms.weights[i]);
      }
      write(sum, at);
    }
  }

  const CombineParams& params_;
  const TermFinder& finder_;
  SumStages stages_;
  int num_parts_;
  TurnWalk next_item_;  // the parts of a row are the owners, tokens their items
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
