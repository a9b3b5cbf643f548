#ifndef FERRY_CUDA_INTRANODE_COMBINE_SUM_BULK_CUH
#define FERRY_CUDA_INTRANODE_COMBINE_SUM_BULK_CUH

/// Summing by the bulk copy engine: a warp's rows land in shared memory while it adds up others. A set is the same
/// piece of the rows of a token, the shorter the more rows there are. Few multiprocessors then hold enough bytes in
/// flight to fill the links, if adding keeps up with them: its loops are short, because code that a multiprocessor's
/// instruction cache cannot hold runs several times slower.

#include "cuda/copy/bulk_copy.cuh"
#include "cuda/intranode/combine_weights.cuh"
#include "cuda/sync/claim.cuh"

namespace ferry::cuda::device {

inline constexpr int kSumSets = 2;
/// Tokens between being found and being summed: one per set that lands, and the next one.
inline constexpr int kSumTokens = kSumSets + 1;
inline constexpr int kSetBytesLog2 = 13;
inline constexpr int kSetBytes = 1 << kSetBytesLog2;
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

/// What is left for the end is cut into parts of rows, which are smaller units of work than tokens: so warps, and with
/// them multiprocessors, end together. Nothing else is gained by parts, and each has the token's terms to find.
inline constexpr std::int64_t kPartBytes = 8192;
inline constexpr int kMaxPartsLog2 = 3;
/// Per warp.
inline constexpr int kPartedTokens = 4;
/// With no more than these, everything is in parts.
inline constexpr int kManyTokens = 8;

/// The units of work of a combine: first whole tokens, in order, then the parts of those that are left.
struct SumItems {
  int num_whole;
  int parts_log2;  ///< of each of the other tokens
  int num;

  struct Item {
    int token;
    int part;
    int parts_log2;
  };

  __device__ static SumItems of(const CombineParams& params, int num_warps) {
    SumItems items{};
    const auto num_tokens = static_cast<int>(params.num_tokens);
    if (num_tokens > num_warps * kManyTokens) items.num_whole = num_tokens - num_warps * kPartedTokens;
    while (items.parts_log2 < kMaxPartsLog2 && kPartBytes << items.parts_log2 < params.row_bytes) ++items.parts_log2;
    items.num = items.num_whole + ((num_tokens - items.num_whole) << items.parts_log2);
    return items;
  }

  __device__ Item at(int idx) const {
    if (idx < num_whole) return {idx, 0, 0};
    const int rest = idx - num_whole;
    return {num_whole + (rest >> parts_log2), rest & ((1 << parts_log2) - 1), parts_log2};
  }
};

/// A walk over the sets of an item.
struct SetCursor {
  int piece = 0;
  int end_piece = 0;
  int bytes_log2 = 0;  ///< of a piece, one row's part of a set

  __device__ static SetCursor of(const SumItems::Item& item, int num_rows, std::int64_t row_bytes) {
    SetCursor cursor;
    // Room for 2, 4, 8, … rows.
    const int room_log2 = num_rows > kTwoRows ? kWarpLanes - __clz(num_rows - 1) : 1;
    cursor.bytes_log2 = kSetBytesLog2 - room_log2;
    const auto num_pieces = static_cast<int>((row_bytes + (1 << cursor.bytes_log2) - 1) >> cursor.bytes_log2);
    cursor.piece = num_pieces * item.part >> item.parts_log2;
    cursor.end_piece = num_pieces * (item.part + 1) >> item.parts_log2;
    return cursor;
  }

  __device__ bool ended() const { return piece >= end_piece; }
  __device__ int piece_bytes() const { return 1 << bytes_log2; }
  __device__ std::int64_t offset() const { return static_cast<std::int64_t>(piece) << bytes_log2; }
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
  FetchedEntries* entries;
};

template <bool kFloat32>
class BulkSummer {
 public:
  /// Of each warp the first two items follow from its number, `first` of `step`; the others it claims.
  __device__ BulkSummer(const CombineParams& params, TermFinder& finder, ReturnedWeights& weights,
                        const SumStages& stages, int first, int step)
      : params_(params),
        finder_(finder),
        weights_(weights),
        stages_(stages),
        items_(SumItems::of(params, step)),
        next_item_(first),
        claim_(first - step),
        num_given_(2 * step) {
    fetch_entries();
  }

  __device__ void run() {
    // Each turn but the first ones adds a set. One more than there are sets come before: the first one only finds what
    // the others load.
    constexpr int kFirstTurn = -1 - kSumSets;
#pragma unroll 1
    for (int turn = kFirstTurn; turn < 0 || next_to_add(); ++turn) {
      const auto set = static_cast<int>(static_cast<unsigned>(turn) % kSumSets);
      if (turn >= 0) add(set);
      load(set);
    }
    wait_fetches();
    weights_.sum();
  }

  /// When nothing is to be summed: waits for what was fetched.
  __device__ void drop() const { wait_fetches(); }

 private:
  /// Of the next item. Every lane has used those before.
  __device__ void fetch_entries() const {
    if (next_item_ < items_.num) finder_.fetch_entries(items_.at(next_item_).token, *stages_.entries);
  }

  /// Starts the next set, or finds the first item. All lanes.
  __device__ void load(int set) {
    if (!loading_.ended()) {
      const Terms& terms = stages_.terms[loading_terms_];
      std::uint64_t* barrier = stages_.barriers + set;
      const std::uint32_t bytes = loading_.bytes(params_.row_bytes);
      if (lane_idx() == 0) expect_loads(barrier, bytes * static_cast<std::uint32_t>(terms.num_rows));
      __syncwarp();
#pragma unroll 1
      for (int row = lane_idx(); row < terms.num_rows; row += kWarpLanes) {
        start_load(stages_.sets + set * kSetBytes + (row << loading_.bytes_log2), terms.rows[row] + loading_.offset(),
                   bytes, barrier);
      }
      ++loading_.piece;
    }
    if (loading_.ended()) begin_item();
  }

  /// Finds the next item's terms. All lanes.
  __device__ void begin_item() {
    if (next_item_ >= items_.num) return;
    const SumItems::Item item = items_.at(next_item_);
    // Fetched and claimed ahead of their use, so that no lane waits for them.
    const TokenEntry entry = finder_.fetched_entry(*stages_.entries);
    weights_.sum();
    next_item_ = num_given_ + __shfl_sync(0xFFFFFFFFU, claim_, 0);
    if (lane_idx() == 0 && next_item_ < items_.num) {
      claim_ = static_cast<int>(claim(&params_.ranks.control.local->num_items_claimed));
    }
    loading_terms_ = loading_terms_ + 1 == kSumTokens ? 0 : loading_terms_ + 1;
    Terms& terms = stages_.terms[loading_terms_];
    const int num_rows = finder_.find(item.token, entry, terms);
    if (num_rows < 0) {
      next_item_ = items_.num;
      return;
    }
    fetch_entries();
    if (item.part == 0) weights_.fetch(item.token, entry.destination);
    if (lane_idx() == 0) {
      terms.num_rows = num_rows;
      terms.token = item.token;
      terms.part = item.part;
    }
    __syncwarp();
    loading_ = SetCursor::of(item, num_rows, params_.row_bytes);
    ++num_found_;
  }

  /// Whether a set is left to be added.
  __device__ bool next_to_add() {
    if (!using_.ended()) return true;
    if (num_found_ == 0) return false;
    --num_found_;
    using_terms_ = using_terms_ + 1 == kSumTokens ? 0 : using_terms_ + 1;
    const Terms& terms = stages_.terms[using_terms_];
    const int parts_log2 = terms.token < items_.num_whole ? 0 : items_.parts_log2;
    using_ = SetCursor::of({terms.token, terms.part, parts_log2}, terms.num_rows, params_.row_bytes);
    return true;
  }

  /// What this lane adds up of a set: vectors kStepBytes apart, while any of the bytes are left.
  struct Vectors {
    SharedAddress from;  ///< of the first row
    std::byte* to;
    int bytes_left;

    __device__ void advance() {
      from += kStepBytes;
      to += kStepBytes;
      bytes_left -= static_cast<int>(kStepBytes);
    }
  };

  /// Adds a set up and writes the sum. All lanes.
  __device__ void add(int set) {
    wait_barrier(stages_.barriers + set, parities_ >> set & 1U);
    parities_ ^= 1U << set;
    const Terms& terms = stages_.terms[using_terms_];
    const std::uint32_t lane_bytes = lane_idx() * kVectorBytes;
    const Vectors vectors{shared_address(stages_.sets) + set * kSetBytes + lane_bytes,
                          params_.out_x + terms.token * params_.out_stride + using_.offset() + lane_bytes,
                          static_cast<int>(using_.bytes(params_.row_bytes)) - static_cast<int>(lane_bytes)};
    // Mostly a row counts once.
    if (terms.num_rows > kManyRows || terms.num_weights != terms.num_rows) {
      add_any_rows(terms, vectors);
    } else if (terms.num_rows <= kTwoRows) {
      add_rows<kTwoRows>(terms, vectors);
    } else if (terms.num_rows <= kFewRows) {
      add_rows<kFewRows>(terms, vectors);
    } else {
      add_rows<kManyRows>(terms, vectors);
    }
    __syncwarp();
    ++using_.piece;
  }

  /// Each of up to `kRows` rows counts with one weight.
  template <int kRows>
  __device__ static void add_rows(const Terms& terms, Vectors vectors) {
    const int num_rows = terms.num_rows;
    float weights[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) weights[row] = row < num_rows ? terms.weights[row] : 0.0F;
#pragma unroll 1
    for (; vectors.bytes_left > 0; vectors.advance()) {
      uint4 raw[kRows];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (row < num_rows) raw[row] = load_landed(vectors.from + row * (kSetBytes / kRows));
      }
      Vector<kFloat32> sum;
      sum.clear();
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (row < num_rows) sum.add(raw[row], weights[row]);
      }
      *reinterpret_cast<uint4*>(vectors.to) = sum.round();
    }
  }

  /// Any number of rows, which several of the token's entries may share: such a row counts with each of their weights.
  __device__ void add_any_rows(const Terms& terms, Vectors vectors) const {
#pragma unroll 1
    for (; vectors.bytes_left > 0; vectors.advance()) {
      Vector<kFloat32> sum;
      sum.clear();
#pragma unroll 1
      for (int row = 0; row < terms.num_rows; ++row) {
        const uint4 raw = load_landed(vectors.from + (row << using_.bytes_log2));
#pragma unroll 1
        for (int i = terms.first_weight[row]; i < terms.first_weight[row + 1]; ++i) sum.add(raw, terms.weights[i]);
      }
      *reinterpret_cast<uint4*>(vectors.to) = sum.round();
    }
  }

  const CombineParams& params_;
  TermFinder& finder_;
  ReturnedWeights& weights_;
  SumStages stages_;
  SumItems items_;
  int next_item_;
  int claim_;  // lane 0: of the item after it, behind those that are given
  int num_given_;
  SetCursor loading_;
  SetCursor using_;
  int loading_terms_ = 0;
  int using_terms_ = 0;
  int num_found_ = 0;  // items that have not been begun to be added
  std::uint32_t parities_ = 0;
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_COMBINE_SUM_BULK_CUH
