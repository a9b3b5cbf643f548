#ifndef FERRY_CUDA_INTRANODE_COMBINE_SUM_BULK_CUH
#define FERRY_CUDA_INTRANODE_COMBINE_SUM_BULK_CUH

/// Summing by the bulk copy engine: some of a warp's rows land in shared memory while the warp adds others. A set is
/// the same piece of all rows of a token; more rows make it shorter. A few multiprocessors then keep enough bytes in
/// flight to fill the links, if adding keeps up. The adding loops are short because code that does not fit a
/// multiprocessor's instruction cache runs several times slower.

#include "cuda/copy/bulk_copy.cuh"
#include "cuda/intranode/combine_weights.cuh"
#include "cuda/sync/claim.cuh"

namespace ferry::cuda::device {

inline constexpr int kSumSets = 2;
/// Tokens that are found but not yet summed: one per set that lands, and the next one.
inline constexpr int kSumTokens = kSumSets + 1;
inline constexpr int kSetBytesLog2 = 13;
inline constexpr int kSetBytes = 1 << kSetBytesLog2;
inline constexpr std::uint32_t kVectorBytes = sizeof(uint4);
inline constexpr std::uint32_t kStepBytes = kWarpLanes * kVectorBytes;
/// Most rows of a set that are added with all rows of a step in registers, in three code variants.
inline constexpr int kTwoRows = 2;
inline constexpr int kFewRows = 4;
inline constexpr int kManyRows = 8;
/// Tokens with more rows are rare.
inline constexpr int kMostRows = 64;
static_assert(kMostRows >= kMaxTerms);
static_assert(kSetBytes / kMostRows % kLandingBytes == 0, "every piece of a set is aligned to kLandingBytes");

/// The last tokens are divided into parts, which are smaller units of work than tokens, so that warps, and with them
/// multiprocessors, finish together. Parts have no other benefit, and each part must find the token's terms again.
inline constexpr std::int64_t kPartBytes = 8192;
inline constexpr int kMaxPartsLog2 = 3;
/// Tokens in parts, per warp.
inline constexpr int kPartedTokens = 4;
/// Up to this many tokens per warp, all tokens are divided into parts.
inline constexpr int kManyTokens = 8;

/// Units of work of a combine: whole tokens in order, then the parts of the remaining tokens.
struct SumItems {
  int num_whole;
  int parts_log2;  ///< log2 of the number of parts of each remaining token
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

/// Iterates over the sets of an item.
struct SetCursor {
  int piece = 0;
  int end_piece = 0;
  int bytes_log2 = 0;  ///< log2 of the size of a piece, one row's part of a set

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
  /// A warp's first two items follow from its number, `first` of `step` warps; it claims the others.
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
    // Every turn except the first ones adds a set. The first turns number one more than the sets: the very first turn
    // only finds the item that the others load.
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

  /// Ends the fetches of the constructor when the call sums nothing.
  __device__ void drop() const { wait_fetches(); }

 private:
  /// Starts to fetch the entries of the next item. Every lane has used the previous ones.
  __device__ void fetch_entries() const {
    if (next_item_ < items_.num) finder_.fetch_entries(items_.at(next_item_).token, *stages_.entries);
  }

  /// Starts to load the next set, or finds the first item. All lanes call it.
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

  /// Finds the next item's terms. All lanes call it.
  __device__ void begin_item() {
    if (next_item_ >= items_.num) return;
    const SumItems::Item item = items_.at(next_item_);
    // Entries are fetched and items are claimed ahead of their use, so that no lane waits for them.
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

  /// Whether any set remains to be added.
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

  /// Part of a set that this lane adds: vectors kStepBytes apart, until no bytes are left.
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

  /// Adds a set and writes the sum. All lanes call it.
  __device__ void add(int set) {
    wait_barrier(stages_.barriers + set, parities_ >> set & 1U);
    parities_ ^= 1U << set;
    const Terms& terms = stages_.terms[using_terms_];
    const std::uint32_t lane_bytes = lane_idx() * kVectorBytes;
    const Vectors vectors{shared_address(stages_.sets) + set * kSetBytes + lane_bytes,
                          params_.out_x + terms.token * params_.out_stride + using_.offset() + lane_bytes,
                          static_cast<int>(using_.bytes(params_.row_bytes)) - static_cast<int>(lane_bytes)};
    // Usually each row counts once.
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

  /// Adds up to `kRows` rows, each with one weight.
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

  /// Adds any number of rows. Several of the token's entries may share a row; such a row counts with each of their
  /// weights.
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
  int claim_;  // lane 0: claimed number of the item after next_item_, counted from num_given_
  int num_given_;
  SetCursor loading_;
  SetCursor using_;
  int loading_terms_ = 0;
  int using_terms_ = 0;
  int num_found_ = 0;  // items found but not yet begun to be added
  std::uint32_t parities_ = 0;
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_COMBINE_SUM_BULK_CUH
