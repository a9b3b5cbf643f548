#ifndef FERRY_CUDA_INTRANODE_COMBINE_PLAIN_ROWS_CUH
#define FERRY_CUDA_INTRANODE_COMBINE_PLAIN_ROWS_CUH

/// Rows that travel as they are. The adding loops are short because code that does not fit a multiprocessor's
/// instruction cache runs several times slower.

#include "cuda/intranode/combine_sets.cuh"

namespace ferry::cuda::device {

template <bool kFloat32>
class PlainRows {
 public:
  static constexpr bool kIsFloat32 = kFloat32;
  /// Whether staging quantises rows, this rank's own among them.
  static constexpr bool kQuantized = false;
  /// Pieces that the stager copies are multiples of this.
  static constexpr std::int64_t kPieceGranule = kLandingBytes;

  /// Iterates over the sets of an item.
  struct Cursor {
    int piece = 0;
    int end_piece = 0;
    int bytes_log2 = 0;  ///< log2 of the size of a piece, one row's part of a set

    __device__ static Cursor of(const SumItems::Item& item, int num_rows, const CombineParams& params) {
      Cursor cursor;
      // Room for 2, 4, 8, … rows.
      const int room_log2 = num_rows > kTwoRows ? kWarpLanes - __clz(num_rows - 1) : 1;
      cursor.bytes_log2 = kSetBytesLog2 - room_log2;
      const auto num_pieces = static_cast<int>((params.row_bytes + (1 << cursor.bytes_log2) - 1) >> cursor.bytes_log2);
      cursor.piece = num_pieces * item.part >> item.parts_log2;
      cursor.end_piece = num_pieces * (item.part + 1) >> item.parts_log2;
      return cursor;
    }

    __device__ bool ended() const { return piece >= end_piece; }
    __device__ int piece_bytes() const { return 1 << bytes_log2; }
    __device__ std::int64_t offset() const { return static_cast<std::int64_t>(piece) << bytes_log2; }
    /// Bytes of one row.
    __device__ std::uint32_t bytes(const CombineParams& params) const {
      const std::int64_t left = params.row_bytes - offset();
      return static_cast<std::uint32_t>(left < piece_bytes() ? left : piece_bytes());
    }
    /// Starts to load the piece of `row`, number `idx` of the set.
    __device__ void load(std::byte* set, int idx, const std::byte* row, std::uint32_t bytes,
                         std::uint64_t* barrier) const {
      start_load(set + (idx << bytes_log2), row + offset(), bytes, barrier);
    }
  };

  /// Adds a set, which begins at `set`, and writes the sum. All lanes call it.
  __device__ static void add(const CombineParams& params, const Terms& terms, const Cursor& cursor, SharedAddress set) {
    const std::uint32_t lane_bytes = lane_idx() * kVectorBytes;
    const Vectors vectors{set + lane_bytes,
                          params.out_x + terms.token * params.out_stride + cursor.offset() + lane_bytes,
                          static_cast<int>(cursor.bytes(params)) - static_cast<int>(lane_bytes)};
    // Usually each row counts once.
    if (terms.num_rows > kManyRows || terms.num_weights != terms.num_rows) {
      add_any_rows(terms, vectors, cursor.bytes_log2);
    } else if (terms.num_rows <= kTwoRows) {
      add_rows<kTwoRows>(terms, vectors);
    } else if (terms.num_rows <= kFewRows) {
      add_rows<kFewRows>(terms, vectors);
    } else {
      add_rows<kManyRows>(terms, vectors);
    }
  }

 private:
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
  __device__ static void add_any_rows(const Terms& terms, Vectors vectors, int bytes_log2) {
#pragma unroll 1
    for (; vectors.bytes_left > 0; vectors.advance()) {
      Vector<kFloat32> sum;
      sum.clear();
#pragma unroll 1
      for (int row = 0; row < terms.num_rows; ++row) {
        const uint4 raw = load_landed(vectors.from + (row << bytes_log2));
#pragma unroll 1
        for (int i = terms.first_weight[row]; i < terms.first_weight[row + 1]; ++i) sum.add(raw, terms.weights[i]);
      }
      *reinterpret_cast<uint4*>(vectors.to) = sum.round();
    }
  }
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_COMBINE_PLAIN_ROWS_CUH
