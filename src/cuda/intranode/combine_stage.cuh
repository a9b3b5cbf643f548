#ifndef FERRY_CUDA_INTRANODE_COMBINE_STAGE_CUH
#define FERRY_CUDA_INTRANODE_COMBINE_STAGE_CUH

/// Staging warps copy or quantise this rank's rows to memory that peers reach. They stage each source's rows in the
/// order in which the source sums them, and all sources at the same pace. Staging itself waits for no peer: only
/// progress reports wait until the peers have entered the call. No rank reads rows that were staged for a refused call.

#include "cuda/intranode/combine_sum_bulk.cuh"
#include "cuda/numeric/quantize_row.cuh"

namespace ferry::cuda::device {

/// Slots into which the stager divides the memory of a warp's sets, to keep more pieces in flight.
inline constexpr int kStagerPieces = 4;
inline constexpr int kStagerPieceBytes = kSumSets * kSetBytes / kStagerPieces;

/// A staging block and its words in shared memory.
struct StageBlock {
  int idx;
  int num_warps;         ///< warps that stage; one more reports
  std::uint32_t* marks;  ///< [num_warps] marks of RoundMarker, initially 0
};

/// Pieces of rows that one warp stages, in order. In each round a block stages one row for every other rank (and, if
/// rows are quantised, one for its own), so that all ranks progress at the same pace. The pieces of a block's rows are
/// dealt to its warps in turn, so that the first rows are complete as early as possible.
template <typename Rows>
class StagedPieces {
 public:
  __device__ StagedPieces(const CombineParams& params, const StageBlock& block)
      : params_(params),
        piece_bytes_(piece_bytes_of(params.row_bytes)),
        num_pieces_(static_cast<int>((params.row_bytes + piece_bytes_ - 1) / piece_bytes_)),
        block_(block.idx),
        walk_(num_sources(params) * num_pieces_, warp_idx(), block.num_warps),
        row_(static_cast<std::int64_t>(block.idx) * block.num_warps + warp_idx()),
        step_(static_cast<std::int64_t>(params.num_stage_blocks) * block.num_warps) {
    if (!params.one_row_per_token) return;
    for (int source = 0; source < params.ranks.num_ranks; ++source) {
      const std::int32_t count = params.source_base[source + 1] - params.source_base[source];
      if (stages(source) && count > most_rows_) most_rows_ = count;
    }
  }

  struct Piece {
    std::int64_t row = 0;
    std::int64_t offset = 0;
    std::uint32_t bytes = 0;  ///< 0: no piece is left
    std::uint32_t round = 0;
  };

  __device__ Piece next() { return params_.one_row_per_token ? next_of_sources() : next_of_experts(); }

 private:
  __device__ static int num_sources(const CombineParams& params) {
    if constexpr (Rows::kQuantized) return params.ranks.num_ranks;
    return params.ranks.num_ranks < 2 ? 1 : params.ranks.num_ranks - 1;
  }

  __device__ bool stages(int source) const { return Rows::kQuantized || source != params_.ranks.rank; }

  /// Pieces have equal length; otherwise warps whose turn is always the last piece would have less to do.
  __device__ static std::int64_t piece_bytes_of(std::int64_t row_bytes) {
    const std::int64_t num_pieces = (row_bytes + kStagerPieceBytes - 1) / kStagerPieceBytes;
    if (num_pieces <= 1) return kStagerPieceBytes;
    return ((row_bytes + num_pieces - 1) / num_pieces + Rows::kPieceGranule - 1) / Rows::kPieceGranule *
           Rows::kPieceGranule;
  }

  __device__ Piece piece_at(std::int64_t row, std::int64_t offset, std::uint32_t round) const {
    const std::int64_t left = params_.row_bytes - offset;
    return {row, offset, static_cast<std::uint32_t>(left < piece_bytes_ ? left : piece_bytes_), round};
  }

  __device__ Piece next_of_sources() {
    for (;; walk_.advance()) {
      const std::int64_t idx = static_cast<std::int64_t>(walk_.idx()) * params_.num_stage_blocks + block_;
      if (idx >= most_rows_) return {};
      const int turn = walk_.owner() / num_pieces_;
      const int behind = params_.ranks.rank + 1 + turn;
      const int source = behind < params_.ranks.num_ranks ? behind : behind - params_.ranks.num_ranks;
      // With two ranks the source never changes.
      if (source != source_) {
        source_ = source;
        first_row_ = params_.source_base[source];
        num_rows_ = params_.source_base[source + 1] - first_row_;
      }
      if (idx >= num_rows_) continue;
      const int piece = walk_.owner() - turn * num_pieces_;
      const auto round = static_cast<std::uint32_t>(walk_.idx());
      walk_.advance();
      return piece_at(first_row_ + idx, piece * piece_bytes_, round);
    }
  }

  /// Rows grouped by expert: a source's first token may be anywhere, so there is only one round. The warp that stages a
  /// row looks up its source, once.
  __device__ Piece next_of_experts() {
    const std::int64_t num_rows = params_.summary->num_used_rows;
    for (; row_ < num_rows; row_ += step_) {
      if (offset_ == 0) {
        const int source = params_.source[2 * row_];
        if (source < 0 || !stages(source)) continue;
      }
      const Piece piece = piece_at(row_, offset_, 0);
      offset_ += piece.bytes;
      if (offset_ == params_.row_bytes) {
        offset_ = 0;
        row_ += step_;
      }
      return piece;
    }
    return {};
  }

  const CombineParams& params_;
  std::int64_t piece_bytes_;
  int num_pieces_;
  int block_;
  TurnWalk walk_;
  std::int64_t row_;
  std::int64_t step_;
  std::int64_t offset_ = 0;
  std::int32_t most_rows_ = 0;
  int source_ = -1;             // source of the previous piece
  std::int32_t first_row_ = 0;  // first row of that source
  std::int32_t num_rows_ = 0;
};

/// Quantises a piece of a row to its place in staging. `load` as for quantize_blocks. All lanes call it.
template <typename Rows, typename Piece, typename Load>
__device__ inline void quantize_piece(const CombineParams& params, const Piece& piece, Load load) {
  const auto first = static_cast<int>(piece.offset / Rows::kPieceGranule);
  const auto num_blocks = static_cast<int>(piece.bytes / Rows::kPieceGranule);
  quantize_blocks<Rows::kIsFloat32>(load, first, first + num_blocks,
                                    params.staging + piece.row * params.entry.rows_stride);
}

template <typename Rows>
__device__ inline void stage_by_threads(const CombineParams& params, StagedPieces<Rows>& pieces, RoundMarker& marker) {
  constexpr int kUnroll = 8;
  for (auto piece = pieces.next(); piece.bytes != 0; piece = pieces.next()) {
    marker.mark_before(piece.round);
    if constexpr (Rows::kQuantized) {
      const std::byte* row = params.x + piece.row * params.x_stride + piece.offset;
      quantize_piece<Rows>(params, piece, [row](int at) { return *reinterpret_cast<const uint4*>(row + at); });
      continue;
    }
    const auto count = static_cast<int>(piece.bytes / sizeof(uint4));
    const auto* from = reinterpret_cast<const uint4*>(params.x + piece.row * params.x_stride + piece.offset);
    auto* to = reinterpret_cast<uint4*>(params.staging + piece.row * params.row_bytes + piece.offset);
    for (int first = lane_idx(); first < count; first += kUnroll * kWarpLanes) {
      uint4 values[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (first + i * kWarpLanes < count) values[i] = from[first + i * kWarpLanes];
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (first + i * kWarpLanes < count) to[first + i * kWarpLanes] = values[i];
      }
    }
  }
}

/// Most pieces whose stores a warp waits for together: waiting after each piece halves the rate at which it moves data.
/// The first pieces are awaited one by one, since peers have nothing else to sum yet.
inline constexpr int kMarkTurns = 4;

/// Stages through the memory of the warp's sets, into which the copy engine loads the rows. It also stores them, unless
/// they are quantised: then the lanes store.
template <typename Rows>
class BulkStager {
 public:
  __device__ BulkStager(const CombineParams& params, StagedPieces<Rows>& pieces, RoundMarker& marker,
                        const SumStages& stages)
      : params_(params), pieces_(pieces), marker_(marker), stages_(stages) {}

  __device__ void run() {
    // Three pieces land while one is stored. The first turns only load.
    constexpr int kAhead = 3;
    static_assert(kStagerPieces == kAhead + 1);
    Piece now;
    Piece next;
    Piece after;
    int slot = kStagerPieces - kAhead;
#pragma unroll 1
    for (int turn = -kAhead; turn < 0 || now.bytes != 0; ++turn) {
      if (turn >= 0) {
        store(now, slot);
        mark(next, turn);
      }
      now = next;
      next = after;
      after = load(slot == 0 ? kStagerPieces - 1 : slot - 1);
      slot = slot + 1 == kStagerPieces ? 0 : slot + 1;
    }
    if constexpr (Rows::kQuantized) return;
    if (lane_idx() == 0) wait_store_groups<0>();
    __syncwarp();
  }

 private:
  using Piece = typename StagedPieces<Rows>::Piece;

  __device__ std::byte* slot_data(int slot) const { return stages_.sets + slot * kStagerPieceBytes; }

  /// Starts to load the next piece into the slot from which the previous turn stored.
  __device__ Piece load(int slot) {
    const Piece piece = pieces_.next();
    if (piece.bytes == 0) return piece;
    if (lane_idx() == 0) {
      if constexpr (!Rows::kQuantized) wait_store_reads<1>();
      expect_loads(stages_.barriers + slot, piece.bytes);
      start_load(slot_data(slot), params_.x + piece.row * params_.x_stride + piece.offset, piece.bytes,
                 stages_.barriers + slot);
    }
    __syncwarp();
    return piece;
  }

  __device__ void store(const Piece& piece, int slot) {
    wait_barrier(stages_.barriers + slot, parities_ >> slot & 1U);
    parities_ ^= 1U << slot;
    if constexpr (Rows::kQuantized) {
      const SharedAddress from = shared_address(slot_data(slot));
      quantize_piece<Rows>(params_, piece, [from](int at) { return load_landed(from + at); });
      __syncwarp();
      return;
    }
    if (lane_idx() == 0) {
      start_store(params_.staging + piece.row * params_.row_bytes + piece.offset, slot_data(slot), piece.bytes);
      close_store_group();
    }
    __syncwarp();
  }

  /// Waits from time to time until all stores are complete, and marks their rounds. `next`: the piece stored next, if
  /// any. `turn`: number of the piece just stored, from 0.
  __device__ void mark(const Piece& next, int turn) {
    if (next.bytes == 0 || turn < next_mark_) return;
    if constexpr (!Rows::kQuantized) {
      if (lane_idx() == 0) wait_store_groups<0>();
      __syncwarp();
    }
    marker_.mark_before(next.round);
    const int half = turn / 2;
    next_mark_ = turn + (half < 1 ? 1 : half < kMarkTurns ? half : kMarkTurns);
  }

  const CombineParams& params_;
  StagedPieces<Rows>& pieces_;
  RoundMarker& marker_;
  SumStages stages_;
  std::uint32_t parities_ = 0;
  int next_mark_ = 0;  // first turn at which to mark again
};

/// Waits until every rank has entered a call of this epoch, of any kind; false if the group broke. All lanes of a warp
/// call it.
__device__ inline bool await_all_entered(const RankParams& ranks, std::uint64_t epoch) {
  bool here = true;
  for (int rank = lane_idx(); rank < ranks.num_ranks; rank += kWarpLanes) {
    const auto read = [&ranks, rank, epoch] {
      const std::uint64_t entered = entry_flags(ranks, epoch).load(rank);
      return entered != 0 ? entered : count_flags(ranks).load(rank);
    };
    here = wait_until(ranks, {Awaited::kEntry, rank, epoch}, read, epoch) && here;
  }
  return __all_sync(0xFFFFFFFFU, static_cast<int>(here)) != 0;
}

/// Stages the rows of a block; each warp stages its own part. `stages`: as for summing, used only with kBulk. All
/// threads of the block call it. Not inlined: it would push the summing code out of the instruction cache.
template <typename Rows, bool kBulk>
__device__ __noinline__ inline void stage_rows(const CombineParams& params, const SumStages& stages,
                                               std::uint64_t epoch, const StageBlock& block) {
  if (warp_idx() == block.num_warps) {
    // Until a rank has entered this call, it still reads the words of `staged` that belong to the previous call.
    if (!await_all_entered(params.ranks, epoch)) return;
    report_rounds<Rows::kQuantized>(
        params.ranks, epoch, {block.idx, block.num_warps, static_cast<std::uint32_t>(params.rounds_between_reports)},
        block.marks);
    return;
  }
  StagedPieces<Rows> pieces(params, block);
  RoundMarker marker(block.marks + warp_idx());
  if constexpr (kBulk) {
    BulkStager<Rows>(params, pieces, marker, stages).run();
  } else {
    stage_by_threads(params, pieces, marker);
  }
  marker.mark_before(kAllStaged);
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_COMBINE_STAGE_CUH
