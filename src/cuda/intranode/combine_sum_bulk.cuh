#ifndef FERRY_CUDA_INTRANODE_COMBINE_SUM_BULK_CUH
#define FERRY_CUDA_INTRANODE_COMBINE_SUM_BULK_CUH

/// Summing by the bulk copy engine: a warp's rows land in shared memory while it adds up others. A set is the same
/// piece of up to eight rows. Few multiprocessors then hold enough bytes in flight to fill the links.

#include "cuda/copy/bulk_copy.cuh"
#include "cuda/intranode/combine_terms.cuh"

namespace ferry::cuda::device {

inline constexpr int kSumSets = 2;
/// Tokens between being found and being summed: one per set that lands, and the next one.
inline constexpr int kSumTokens = kSumSets + 1;
inline constexpr int kSetBytes = 8192;
static_assert(kSetBytes / 8 % kLandingBytes == 0, "a piece of a set of eight rows begins at a good destination");
inline constexpr std::int64_t kStepBytes = kWarpLanes * static_cast<std::int64_t>(sizeof(uint4));
/// A set of fewer rows takes longer pieces of them.
inline constexpr int kTwoRows = 2;
inline constexpr int kFewRows = 4;
inline constexpr int kManyRows = 8;

/// Longest part of a row that is one warp's work: with longer ones, warps that have one less wait too long for those
/// that have one more.
inline constexpr std::int64_t kPartBytes = 8192;

/// A warp's unit of work: part `part` of `num_parts` of a token's row.
struct SumItem {
  std::int64_t token = -1;  ///< -1: no more
  int part = 0;
};

/// How an item is cut into sets.
struct SetPlan {
  std::int64_t token = -1;  ///< -1: no more
  int num_rows = 0;
  int rows_per_set = kManyRows;
  int piece_bytes = 0;
  int first_piece = 0;
  int end_piece = 0;
  int num_batches = 1;  ///< sets per piece, for tokens of more rows than a set has

  __device__ static SetPlan of(const SumItem& item, int num_parts, int num_rows, std::int64_t row_bytes) {
    SetPlan plan;
    plan.token = item.token;
    plan.num_rows = num_rows;
    plan.rows_per_set = num_rows <= kTwoRows ? kTwoRows : num_rows <= kFewRows ? kFewRows : kManyRows;
    plan.piece_bytes = kSetBytes / plan.rows_per_set;
    const auto num_pieces = static_cast<int>((row_bytes + plan.piece_bytes - 1) / plan.piece_bytes);
    plan.first_piece = num_pieces * item.part / num_parts;
    plan.end_piece = num_pieces * (item.part + 1) / num_parts;
    plan.num_batches = num_rows <= plan.rows_per_set ? 1 : (num_rows + plan.rows_per_set - 1) / plan.rows_per_set;
    return plan;
  }
};

/// A walk over the sets of an item.
struct SetCursor {
  SetPlan plan;
  int piece = 0;
  int batch = 0;

  __device__ static SetCursor of(const SetPlan& plan) { return {plan, plan.first_piece, 0}; }
  /// False behind the last set.
  __device__ bool advance() {
    if (++batch < plan.num_batches) return true;
    batch = 0;
    return ++piece < plan.end_piece;
  }
  __device__ int first_row() const { return batch * plan.rows_per_set; }
  __device__ int num_rows() const {
    const int left = plan.num_rows - first_row();
    return left < plan.rows_per_set ? left : plan.rows_per_set;
  }
  __device__ std::int64_t offset() const { return static_cast<std::int64_t>(piece) * plan.piece_bytes; }
  __device__ std::uint32_t bytes(std::int64_t row_bytes) const {
    const std::int64_t left = row_bytes - offset();
    return static_cast<std::uint32_t>(left < plan.piece_bytes ? left : plan.piece_bytes);
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
        num_parts_(parts_of(params)),
        next_item_(num_parts_, first, step) {
    next_destination_ = finder.load_destination(next_item_.idx());
  }

  __device__ void run() {
    begin_item(loading_, loading_terms_);
    using_ = loading_;
    for (int set = 0; set < kSumSets; ++set) load(set);
    while (using_.plan.token >= 0) {
      for (int set = 0; set < kSumSets && using_.plan.token >= 0; ++set) {
        add(set);
        load(set);
      }
    }
  }

 private:
  __device__ static int parts_of(const CombineParams& params) {
    const auto parts = static_cast<int>((params.row_bytes + kPartBytes - 1) / kPartBytes);
    return parts < 1 ? 1 : parts;
  }

  /// Finds the next item's terms. All lanes.
  __device__ void begin_item(SetCursor& cursor, int terms_idx) {
    cursor = {};
    const SumItem item{next_item_.idx(), next_item_.rank()};
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
    cursor = SetCursor::of(SetPlan::of(item, num_parts_, num_rows, params_.row_bytes));
    if (lane_idx() == 0) {
      terms.num_rows = num_rows;
      terms.token = item.token;
      terms.part = item.part;
    }
    __syncwarp();
  }

  /// Starts the next set. All lanes.
  __device__ void load(int set) {
    if (loading_.plan.token < 0) return;
    const Terms& terms = stages_.terms[loading_terms_];
    std::uint64_t* barrier = stages_.barriers + set;
    const std::uint32_t bytes = loading_.bytes(params_.row_bytes);
    const int num_rows = loading_.num_rows();
    if (lane_idx() == 0) expect_loads(barrier, bytes * static_cast<std::uint32_t>(num_rows));
    __syncwarp();
    if (lane_idx() < num_rows) {
      start_load(stages_.sets + set * kSetBytes + lane_idx() * loading_.plan.piece_bytes,
                 terms.rows[loading_.first_row() + lane_idx()] + loading_.offset(), bytes, barrier);
    }
    if (loading_.advance()) return;
    loading_terms_ = (loading_terms_ + 1) % kSumTokens;
    begin_item(loading_, loading_terms_);
  }

  /// Adds a set up; at the end of a piece, writes it. All lanes.
  __device__ void add(int set) {
    wait_barrier(stages_.barriers + set, parities_ >> set & 1U);
    parities_ ^= 1U << set;
    if (using_.plan.rows_per_set == kTwoRows) {
      add_rows<kTwoRows>(set);
    } else if (using_.plan.rows_per_set == kFewRows) {
      add_rows<kFewRows>(set);
    } else {
      add_rows<kManyRows>(set);
    }
    __syncwarp();
    if (using_.advance()) return;
    using_terms_ = (using_terms_ + 1) % kSumTokens;
    using_ = {};
    // The next item is being loaded already, or there is none.
    if (using_terms_ == loading_terms_ && loading_.plan.token < 0) return;
    const Terms& terms = stages_.terms[using_terms_];
    using_ = SetCursor::of(SetPlan::of({terms.token, terms.part}, num_parts_, terms.num_rows, params_.row_bytes));
  }

  template <int kRows>
  __device__ void add_rows(int set) {
    constexpr int kSteps = kSetBytes / kRows / static_cast<int>(kStepBytes);
    const Terms& terms = stages_.terms[using_terms_];
    const std::byte* base = stages_.sets + set * kSetBytes + lane_idx() * static_cast<int>(sizeof(uint4));
    const auto bytes = static_cast<std::int64_t>(using_.bytes(params_.row_bytes));
    const int first_row = using_.first_row();
    const int num_rows = using_.num_rows();
    // Mostly a row counts once: then its weight waits in a register.
    const bool once = terms.num_weights == terms.num_rows;
    float weights[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) weights[row] = row < num_rows ? terms.weights[first_row + row] : 0.0F;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::int64_t at = step * kStepBytes + lane_idx() * static_cast<std::int64_t>(sizeof(uint4));
      if (at >= bytes) break;
      uint4 raw[kRows];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (row < num_rows) {
          raw[row] = *reinterpret_cast<const uint4*>(base + row * (kSetBytes / kRows) + step * kStepBytes);
        }
      }
      Vector<kFloat32> own;
      Vector<kFloat32>& sum = kRows == kManyRows ? sums_[step % kKeptSums] : own;
      if (using_.batch == 0) sum.clear();
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (row >= num_rows) break;
        if (once) {
          sum.add(raw[row], weights[row]);
        } else {
          add_weights(terms, first_row + row, raw[row], sum);
        }
      }
      if (using_.batch + 1 < using_.plan.num_batches) continue;
      std::byte* out = params_.out_x + using_.plan.token * params_.out_stride + using_.offset() + at;
      *reinterpret_cast<uint4*>(out) = sum.round();
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
  // Only tokens of many rows take several sets for a piece.
  static constexpr int kKeptSums = kSetBytes / kManyRows / static_cast<int>(kStepBytes);
  Vector<kFloat32> sums_[kKeptSums];
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_COMBINE_SUM_BULK_CUH
