#ifndef FERRY_CUDA_INTRANODE_COMBINE_FP8_ROWS_CUH
#define FERRY_CUDA_INTRANODE_COMBINE_FP8_ROWS_CUH

/// Rows that travel as FP8 (numeric/wire_row.hpp). A piece is some groups of blocks; tokens with many rows, whose sets
/// have no room for a group of each, take single blocks. Biases are no rows of a set: they have another format, and are
/// loaded where they are added.

#include "cuda/intranode/combine_sets.cuh"
#include "cuda/numeric/wire_sum.cuh"

namespace ferry::cuda::device {

template <bool kFloat32>
class Fp8Rows {
 public:
  static constexpr bool kIsFloat32 = kFloat32;
  static constexpr bool kQuantized = true;
  /// Pieces that the stager quantises are whole blocks.
  static constexpr std::int64_t kPieceGranule = kQuantBlockSize * (kFloat32 ? 4 : 2);

  /// Iterates over the sets of an item.
  struct Cursor {
    int piece = 0;
    int end_piece = 0;
    int piece_groups = 0;  ///< 0: a piece is a single block
    int slot_bytes = 0;    ///< of one row in a set

    __device__ static Cursor of(const SumItems::Item& item, int num_rows, const CombineParams& params) {
      Cursor cursor;
      cursor.slot_bytes = num_rows > kManyRows ? kBlockSlotBytes : slot_of(num_rows < 1 ? 1 : num_rows);
      if (num_rows <= kManyRows) {
        // Each part of a token has a piece: a warp awaits a set for every item. Tokens have parts only if their rows
        // have more groups than parts (kPartBytes).
        const int num_groups_of_row = (channels_of(params) + kGroupChannels - 1) / kGroupChannels;
        const int most_groups = num_groups_of_row >> item.parts_log2;
        const int num_groups = groups_of(cursor.slot_bytes);
        cursor.piece_groups = num_groups < most_groups ? num_groups : most_groups;
      }
      const int piece_channels = cursor.piece_channels();
      const int num_pieces = (channels_of(params) + piece_channels - 1) / piece_channels;
      cursor.piece = num_pieces * item.part >> item.parts_log2;
      cursor.end_piece = num_pieces * (item.part + 1) >> item.parts_log2;
      return cursor;
    }

    __device__ bool ended() const { return piece >= end_piece; }
    __device__ bool is_block() const { return piece_groups == 0; }
    __device__ int piece_channels() const {
      return is_block() ? static_cast<int>(kQuantBlockSize) : piece_groups * kGroupChannels;
    }
    __device__ int first_channel() const { return piece * piece_channels(); }
    __device__ int num_channels(const CombineParams& params) const {
      const int left = channels_of(params) - first_channel();
      return left < piece_channels() ? left : piece_channels();
    }
    /// Distance of a landed piece from the start of its slot: it lies as in its row with respect to kLandingBytes.
    __device__ int shift() const { return is_block() ? 0 : piece * piece_groups * kGroupBytes % kLandingBytes; }
    /// Bytes of one row.
    __device__ std::uint32_t bytes(const CombineParams& params) const {
      if (is_block()) return kQuantBlockSize + sizeof(uint4);
      return (num_channels(params) + kGroupChannels - 1) / kGroupChannels * kGroupBytes;
    }
    /// Starts to load the piece of `row`, number `idx` of the set.
    __device__ void load(std::byte* set, int idx, const std::byte* row, std::uint32_t bytes,
                         std::uint64_t* barrier) const {
      std::byte* const slot = set + idx * slot_bytes;
      if (is_block()) {
        start_load(slot, row + block_codes_at(piece), kQuantBlockSize, barrier);
        start_load(slot + kQuantBlockSize, row + group_scales_at(piece), sizeof(uint4), barrier);
        return;
      }
      start_load(slot + shift(), row + static_cast<std::int64_t>(piece) * piece_groups * kGroupBytes, bytes, barrier);
    }
    /// Offset of the scale of a piece's first block from the start of the piece in shared memory.
    __device__ int scales_at() const {
      if (!is_block()) return kGroupScalesAt;
      return static_cast<int>(kQuantBlockSize) + piece % kGroupBlocks * static_cast<int>(sizeof(float));
    }
  };

  /// Adds a set, which begins at `set`, and writes the sum. All lanes call it.
  __device__ static void add(const CombineParams& params, const Terms& terms, const Cursor& cursor, SharedAddress set) {
    const int lane_channel = lane_idx() * Sums::kChannels;
    const Lane lane{set + cursor.shift() + lane_channel,
                    set + cursor.shift() + cursor.scales_at() +
                        lane_channel / static_cast<int>(kQuantBlockSize) * static_cast<int>(sizeof(float)),
                    cursor.slot_bytes, static_cast<std::int64_t>(cursor.first_channel() + lane_channel),
                    cursor.num_channels(params) - lane_channel};
    if (terms.num_rows > kManyRows || terms.num_weights != terms.num_rows) {
      add_any_rows(params, terms, lane);
    } else if (terms.num_rows <= kTwoRows) {
      add_rows<kTwoRows>(params, terms, lane);
    } else if (terms.num_rows <= kFewRows) {
      add_rows<kFewRows>(params, terms, lane);
    } else {
      add_rows<kManyRows>(params, terms, lane);
    }
  }

 private:
  using Sums = ChannelSums<kFloat32>;

  static constexpr int kBlockSlotBytes = kSetBytes / kMaxTopk;
  static_assert(kBlockSlotBytes >= kQuantBlockSize + sizeof(uint4) && kBlockSlotBytes % kLandingBytes == 0);
  /// Channels that a warp adds in a step: half a group.
  static constexpr int kStepChannels = kWarpLanes * Sums::kChannels;
  static_assert(2 * kStepChannels == kGroupChannels);

  __device__ static int channels_of(const CombineParams& params) {
    return static_cast<int>(params.row_bytes) / Sums::kElementBytes;
  }

  /// Bytes of each of `num_rows` slots of a set.
  __device__ static int slot_of(int num_rows) { return kSetBytes / num_rows / kLandingBytes * kLandingBytes; }

  /// Most groups for which a slot has room wherever the piece lies in its row.
  __device__ static int groups_of(int slot_bytes) {
    constexpr int kGranules = kLandingBytes / static_cast<int>(sizeof(uint4));
    static_assert(kGroupBytes % kLandingBytes == sizeof(uint4), "n groups shift the next piece by n granules");
    int num_groups = slot_bytes / kGroupBytes;
    const auto most_shift = [](int groups) {
      const int step = groups & -groups;  // pieces are shifted by multiples of it
      return (kGranules - (step < kGranules ? step : kGranules)) * static_cast<int>(sizeof(uint4));
    };
    while (num_groups > 1 && num_groups * kGroupBytes + most_shift(num_groups) > slot_bytes) --num_groups;
    return num_groups;
  }
  static_assert(kSetBytes / kManyRows >= kGroupBytes + kLandingBytes, "a group of each of many rows fits");
  static_assert(kPartBytes / Sums::kElementBytes / 2 >= kGroupChannels, "a part of a row is a group or more");

  /// Channels of a set that this lane adds: eight of each step.
  struct Lane {
    SharedAddress codes;   ///< of the first row
    SharedAddress scales;  ///< of the first row
    int slot_bytes;
    std::int64_t channel;
    int channels_left;
    bool second = false;  ///< half of the group

    __device__ void advance() {
      constexpr int kScaleStep = kStepChannels / static_cast<int>(kQuantBlockSize) * static_cast<int>(sizeof(float));
      codes += second ? kGroupBytes - kStepChannels : kStepChannels;
      scales += second ? kGroupBytes - kScaleStep : kScaleStep;
      channel += kStepChannels;
      channels_left -= kStepChannels;
      second = !second;
    }
  };

  __device__ static Sums begin(const CombineParams& params, const Terms& terms, const Lane& lane) {
    Sums sums;
    sums.clear();
    sums.add_biases(params.wire_bias, terms.token, lane.channel * Sums::kElementBytes);
    return sums;
  }

  __device__ static void end(const CombineParams& params, const Terms& terms, const Lane& lane, const Sums& sums) {
    sums.store(params.out_x + terms.token * params.out_stride + lane.channel * Sums::kElementBytes);
  }

  /// Adds up to `kRows` rows, each with one weight.
  template <int kRows>
  __device__ static void add_rows(const CombineParams& params, const Terms& terms, Lane lane) {
    const int num_rows = terms.num_rows;
    float weights[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) weights[row] = row < num_rows ? terms.weights[row] : 0.0F;
#pragma unroll 1
    for (; lane.channels_left > 0; lane.advance()) {
      uint2 codes[kRows];
      float scales[kRows];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (row >= num_rows) continue;
        codes[row] = load_landed_pair(lane.codes + row * lane.slot_bytes);
        scales[row] = load_landed_float(lane.scales + row * lane.slot_bytes);
      }
      Sums sums = begin(params, terms, lane);
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (row < num_rows) sums.add(codes[row], scales[row], weights[row]);
      }
      end(params, terms, lane, sums);
    }
  }

  /// Adds any number of rows. Several of the token's entries may share a row; such a row counts with each of their
  /// weights.
  __device__ static void add_any_rows(const CombineParams& params, const Terms& terms, Lane lane) {
#pragma unroll 1
    for (; lane.channels_left > 0; lane.advance()) {
      Sums sums = begin(params, terms, lane);
#pragma unroll 1
      for (int row = 0; row < terms.num_rows; ++row) {
        const uint2 codes = load_landed_pair(lane.codes + row * lane.slot_bytes);
        const float scale = load_landed_float(lane.scales + row * lane.slot_bytes);
#pragma unroll 1
        for (int i = terms.first_weight[row]; i < terms.first_weight[row + 1]; ++i) {
          sums.add(codes, scale, terms.weights[i]);
        }
      }
      end(params, terms, lane, sums);
    }
  }
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_COMBINE_FP8_ROWS_CUH
