#ifndef FERRY_CUDA_LATENCY_PARAMS_HPP
#define FERRY_CUDA_LATENCY_PARAMS_HPP

/// Parameters of the kernels of latency mode.

#include <cstddef>
#include <cstdint>

#include "cuda/call/route_result.hpp"
#include "cuda/far/params.hpp"
#include "cuda/latency/far_message.hpp"
#include "cuda/latency/fp8_row.hpp"
#include "cuda/latency/tables.hpp"
#include "cuda/latency/window.hpp"
#include "cuda/placement/counters.hpp"
#include "cuda/placement/placement_tables.hpp"
#include "cuda/sync/rank_params.hpp"
#include "ferry/latency.hpp"
#include "ferry/quantization.hpp"
#include "ferry/types.hpp"

namespace ferry::cuda {

/// Threads of a block of latency_dispatch, in either half or both.
inline constexpr int kDispatchThreads = 512;
/// Bytes of a row that a warp of the receive half copies at a time.
inline constexpr int kReceiveStepBytes = 1024;

/// Rounds up the bytes of a part of a block's shared memory that another part follows.
FERRY_HOST_DEVICE constexpr std::size_t round_up_part(std::size_t bytes) {
  return (bytes + plan::kPartAlignment - 1) / plan::kPartAlignment * plan::kPartAlignment;
}

/// Parameters of every half of every call.
struct LatencyParams {
  RankParams ranks;
  LatencyLayout layout;
  std::uint64_t agreement = 0;  ///< hash of the call; send halves only send it, receive halves compare it
  std::int64_t record_number = 0;
  // Shape of the dispatch.
  std::int64_t num_tokens = 0;  ///< T
  std::int64_t max_tokens = 0;  ///< M
  int num_topk = 0;
  int num_experts = 0;
  int num_local_experts = 0;
  std::int64_t slab_capacity = 0;
  LatencyTables tables;
  int num_blocks = 1;     ///< blocks of this launch
  bool overlaps = false;  ///< LaunchShape::overlaps, in groups that do not mask lost ranks
  bool small = false;     ///< is_small_in_halves() or is_small_over_nodes(), of the halves of a dispatch
  /// Waits are counted to their end, since the program has asked what this call waits for (wait_times.hpp)
  bool counts_waits = false;
};

/// A row as dispatch moves it: bytes of x, then its scales, packed; both begin at multiples of 16.
struct LatencyRow {
  std::int64_t x_bytes = 0;
  int num_scales = 0;   ///< S
  int scale_bytes = 0;  ///< of one scale

  FERRY_HOST_DEVICE constexpr std::int64_t scales_offset() const { return (x_bytes + 15) / 16 * 16; }
  FERRY_HOST_DEVICE constexpr std::int64_t used_bytes() const {
    return scales_offset() + std::int64_t{num_scales} * scale_bytes;
  }
  FERRY_HOST_DEVICE constexpr std::int64_t stride() const { return round_up_row(used_bytes()); }
};

/// [rows, S], strides in elements of scale_bytes.
struct ConstScales {
  const std::byte* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 1;
};

/// [L, C, S], strides as above.
struct SlabScales {
  std::byte* data = nullptr;
  std::int64_t expert_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 1;
};

struct DispatchSendParams {
  LatencyParams call;
  PlacementTables placement;
  const void* topk_idx = nullptr;
  bool wide_ids = false;           ///< i64, else i32
  const float* weights = nullptr;  ///< [T, K] or null
  /// [1] number of tokens that count, perhaps out of range; null: all. The peers take it for T.
  const std::int32_t* num_tokens_view = nullptr;
  const std::byte* x = nullptr;  ///< [T] rows; bf16 [T, H] if they are quantised
  std::int64_t x_stride = 0;     ///< bytes
  std::int64_t hidden = 0;       ///< H, only where rows are quantised
  Quantization quantize = Quantization::kNone;
  ConstScales scales;   ///< scales of the input; data is null: none
  LatencyRow row;       ///< the row as it travels
  int num_senders = 1;  ///< blocks that send rows: those after the first one
};

/// Whether tokens pick among several homes of an expert. Such calls have kernels of their own; other kernels hold none
/// of that code.
inline bool has_homes(const PlacementTables& placement) {
  return placement.homes.ranges != nullptr || placement.homes.check != nullptr;
}

inline constexpr int kMaxWarpsPerRow = 8;

/// Parameters of a receive half, without its call.
struct DispatchReceiveRows {
  PlacementTables placement;
  std::byte* x = nullptr;     ///< [L * C] rows
  std::int64_t x_stride = 0;  ///< bytes
  SlabScales scales;          ///< data is null: none
  LatencyRow row;
  bool zero_padding = false;
  int first_receiver = 1;  ///< first block that copies rows
  /// Last blocks, which copy no rows. If there are any, only these mark the rows of the slab that hold no token. Not
  /// used with zero_padding.
  int num_gap_blocks = 0;
  CounterTables counters;
  int warps_per_row = 1;  ///< warps that share the copy of one row; a power of two, at most kMaxWarpsPerRow
  RouteResultTables host;
};

/// call.num_blocks is at least 2, since the first block copies no rows, and more than first_receiver and
/// num_gap_blocks.
struct DispatchReceiveParams : DispatchReceiveRows {
  LatencyParams call;
  Quantization quantize = Quantization::kNone;  ///< of the send half; only chooses the kernel
};

/// has_homes(), or counters: kernels without homes do not add to counters either.
inline bool has_homes_or_counters(const DispatchReceiveRows& receive) {
  return has_homes(receive.placement) || receive.counters.any();
}

/// A call that is not split. LatencyParams are in `send` alone: a multiprocessor fetches each line of parameters that a
/// kernel reads.
struct LatencyDispatchParams {
  DispatchSendParams send;
  DispatchReceiveRows receive;
};

/// Whether the call has a kernel of its own, which takes less time and holds no other code: few tokens on few ranks,
/// with a block for each token that is sent and a warp for each that may come.
bool is_small(const LatencyDispatchParams& params);
/// The same of a call that is split.
bool is_small_in_halves(const LatencyDispatchParams& params, int num_receive_blocks);
/// The same in groups of several nodes: what travels between nodes is words alone.
bool is_small_over_nodes(const LatencyDispatchParams& params, int num_receive_blocks, const FarLayout& layout);

/// Kind of a combine's rows. Kernels have code for one of them.
enum class RowKind : int {
  kBfloat16 = 0,
  kFloat32 = 1,
  kFp8Sums = 2,  ///< bf16; sums of ranks travel as FP8 (fp8_row.hpp). With kRankSums
};
inline constexpr int kNumRowKinds = 3;

/// Rows of a combine.
struct CombineRows {
  std::int64_t row_bytes = 0;  ///< of an input or output; a multiple of 16
  RowKind kind = RowKind::kBfloat16;
  CombineOrder order = CombineOrder::kExact;
  /// LatencyLayout::word_step_vectors, fp8_step_vectors() or word_step_vectors_over_nodes(); not 0: sums travel as
  /// words. Such calls have kernels of their own: others take longer even if they only hold the code.
  int word_step_vectors = 0;

  FERRY_HOST_DEVICE constexpr bool words() const { return word_step_vectors != 0; }
  FERRY_HOST_DEVICE constexpr bool fp8() const { return kind == RowKind::kFp8Sums; }
  /// Bytes of a row that travels, if not as words.
  FERRY_HOST_DEVICE constexpr std::int64_t wire_bytes() const { return fp8() ? fp8_row_bytes(row_bytes) : row_bytes; }
  /// Distance of such rows from each other.
  FERRY_HOST_DEVICE constexpr std::int64_t wire_stride() const { return round_up_row(wire_bytes()); }
  /// Bytes of a row that travels between nodes as words.
  FERRY_HOST_DEVICE constexpr std::int64_t far_words_bytes() const {
    return fp8() ? fp8_row_words_bytes(row_bytes) : far_row_words_bytes(row_bytes);
  }
};

/// TileSignals of a combine.
struct TileWords {
  const std::int32_t* words = nullptr;  ///< [L][tiles_per_expert]; null: all rows are final
  std::int32_t tile_rows = 1;
  std::int32_t tiles_per_expert = 0;
  std::int32_t threshold = 0;

  FERRY_HOST_DEVICE constexpr bool present() const { return words != nullptr; }
};

/// Waits for all tiles before a combine whose kernels do not wait for theirs.
struct TilesGateParams {
  LatencyParams call;
  TileWords tiles;
};

/// Parameters of a send half. If the dispatch was refused, no rank sends rows, and the send half reports why.
struct CombineSendParams {
  LatencyParams call;
  CombineRows rows;
  const std::byte* x = nullptr;  ///< [L * C] rows
  std::int64_t x_stride = 0;     ///< bytes
  /// The weights are this combine's, else the dispatch's. The same on every rank: with kRankSums they are sent ahead.
  bool own_weights = false;
  const float* weights = nullptr;  ///< [T, K], read if own_weights
  TileWords tiles;                 ///< absent in calls that are small: launch_tiles_gate()
};

/// Parameters of a receive half, without its call.
struct CombineReceiveRows {
  CombineRows rows;
  std::byte* out = nullptr;        ///< [T] rows
  std::int64_t out_stride = 0;     ///< bytes
  const float* weights = nullptr;  ///< [T, K] given to this combine or to the dispatch; read with kExact
  bool own_weights = false;        ///< CombineSendParams::own_weights
  int first_receiver = 1;          ///< blocks from 1 to before this one are helpers (combine_receive.cuh)
  FarParams far;                   ///< present in groups of several nodes
};

struct CombineReceiveParams : CombineReceiveRows {
  LatencyParams call;
};

/// Blocks of either half, at least 2: enough for the largest call of this shape to use all of `num_sms`.
int combine_blocks(const LatencyParams& call, const CombineRows& rows, int num_sms);
/// A call that is not split, as LatencyDispatchParams.
struct LatencyCombineParams {
  CombineSendParams send;
  CombineReceiveRows receive;
};

/// Whether the call has a kernel of its own, which takes less time: sums travel as words, between few ranks.
bool is_small(const LatencyCombineParams& params);
/// Vectors of a step in which all sums of a combine travel as words in a group of several nodes, or 0: they do not.
/// Such calls have a kernel of their own. The same on every rank of a call. `window`: memory of the group.
int word_step_vectors_over_nodes(const CombineRows& rows, std::int64_t max_tokens, const LatencyLayout& window,
                                 const FarLayout& far);

// Parameters of calls in groups of several nodes (cuda/far).

struct FarDispatchParams : DispatchSendParams {
  FarParams far;
};
/// Blocks before first_receiver take what far ranks have sent (far_receive.cuh).
struct FarDispatchReceiveParams : DispatchReceiveParams {
  FarParams far;
};
/// Send half of a combine.
struct FarCombineParams : CombineSendParams {
  FarParams far;
  std::byte* returns = nullptr;          ///< memory that rows leave from that no small call sends (take_returns)
  std::int64_t most_returns = 0;         ///< rows that it has room for
  std::uint64_t returns_of_network = 0;  ///< its address for the network
  std::int64_t returns_stride = 0;       ///< room for a row, words or not
};
/// Either half of a refusal, before that inside the node.
struct FarRefusalParams {
  LatencyParams call;  ///< agreement 0
  FarParams far;
  LatencyKind kind = LatencyKind::kDispatch;
};

/// A call that this rank cannot make: its peers learn of it, and the call's number and set are used up. One block.
struct LatencyRefusalParams {
  LatencyParams call;  ///< agreement 0
  LatencyKind kind = LatencyKind::kDispatch;
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LATENCY_PARAMS_HPP
