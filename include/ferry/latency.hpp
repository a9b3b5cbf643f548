#ifndef FERRY_LATENCY_HPP
#define FERRY_LATENCY_HPP

/// Inputs, outputs and options of latency mode: `Group::latency_dispatch`, `latency_combine` and `latency_receive`, for
/// the small batches of decoding. See docs/latency.md.
///
/// A dispatch routes and sends in one call, into a slab `[L, C, H]`; a combine returns the weighted sums. Either may be
/// split: the call itself is then the *send half*, which waits for no rows, and `latency_receive` the *receive half*.
/// Between them the program may do other work, also with this group.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ferry/exchange.hpp"
#include "ferry/export.hpp"
#include "ferry/placement.hpp"
#include "ferry/quantization.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry {

/// Split dispatches of a group whose receive half may be outstanding at the same time, and as many split combines: two
/// micro-batches whose exchanges and computations alternate.
inline constexpr int kMaxLatencyCallsInFlight = 2;

/// Inputs of latency_dispatch on one rank.
struct LatencyDispatchInput {
  ConstTensorView x{};  ///< [T, H] bf16 if dispatch quantises, otherwise any dtype: rows move as bytes
  /// [T, S] f32 | i32 | u8, any strides: scales of rows that are already quantised. Absent: none are sent, or
  /// quantising makes them.
  ConstTensorView scales{};
  ConstTensorView topk_idx{};      ///< [T, K] i32 | i64, contiguous: global expert id, -1 = no expert
  ConstTensorView topk_weights{};  ///< [T, K] f32, contiguous: kept for a latency_combine without weights
  /// [1] i32, may be given on some ranks only: number of tokens that count, from the first on. The others are treated
  /// as if all their ids were -1, whatever those are, so nothing is sent for them and latency_combine writes zeros. A
  /// value below 0 means 0, above T means T. On a GPU it is read when the send half runs, so that replays of a graph
  /// may use other numbers. Absent: all T count.
  ConstTensorView num_tokens_view{};
};

/// Outputs of latency_dispatch on one rank.
struct LatencyDispatchOutput {
  TensorView x{};  ///< [L, C, H] or [L*C, H]: dtype of the input, or the quantised dtype
  /// [L, C, S] or [L*C, S], any strides (so row- or column-major for each expert), dtype of the input's; present
  /// exactly if the input's scales are, or if dispatch quantises.
  TensorView scales{};
};

/// Options of latency_dispatch. The same on every rank, except `zero_padding`, `split`, `kernel`, `counters` and
/// `wait_times_ns`.
struct LatencyDispatchOptions {
  std::int64_t num_experts = 0;    ///< E >= 1; need not be a multiple of R
  std::int64_t max_tokens = 0;     ///< M >= 1: the most tokens of any rank in this call
  std::int64_t slab_capacity = 0;  ///< C: rows of each local expert; R * M is always enough
  /// As RouteOptions::expert_to_rank; empty: contiguous.
  std::vector<std::int32_t> expert_to_rank{};
  /// As DispatchOptions::quantize.
  Quantization quantize = Quantization::kNone;
  /// Clear the rows of the slab, and their scales, that hold no token. Otherwise they are left untouched.
  bool zero_padding = false;
  /// This call is the send half.
  bool split = false;
  KernelOptions kernel{};
  /// As in RouteOptions. Masked ranks keep their homes; L counts physical experts. Counters are written when the call
  /// is over, and leave out everything that masked ranks send or would receive.
  Placement placement{};
  LoadCounters counters{};
  /// [R] i64, contiguous, in memory of the group's backend; absent: none. This call's waits for each rank are added,
  /// counted as by Group::wait_times_ns: for a split call, those of its receive half. On GPUs in stream order, in
  /// graphs too, and each wait in full. Its contents are unspecified until the call is over. It must live as long as
  /// the outputs.
  TensorView wait_times_ns{};
};

/// Order of additions in a combine.
enum class CombineOrder : std::int32_t {
  /// As a weighted `Group::combine`: the sum over a token's entries in fp32 by fused multiply-add, in ascending (rank,
  /// row, k), rounded once (over several nodes once per node, and once at the source).
  kExact = 0,
  /// Each rank adds its rows of a token in the same way and rounds the sum, so that one row per token and rank travels;
  /// the sum of those rows, in ascending rank, is rounded again (over several nodes: by each node, and then the nodes'
  /// sums by the source). All sums in fp32, from +0, rounded to nearest-even.
  kRankSums = 1,
};

/// Words by which the kernel or thread that computes a combine's rows reports tiles of them as finished, so that the
/// combine may begin while it still computes. See docs/latency-gpus.md.
///
/// Whoever computes rows of a tile stores them and then adds to the tile's word with release semantics at device scope:
/// on a GPU after a barrier of the block, `cuda::atomic_ref<int, cuda::thread_scope_device>::fetch_add(1,
/// cuda::memory_order_release)` or `__threadfence(); atomicAdd(word, 1)`; on the CPU std::atomic_ref, from any thread.
/// The combine acquires the word before it reads a row of the tile. The program zeroes the words before the computation
/// begins, on GPUs in stream order before both kernels, and before each replay of a graph.
///
/// The combine waits only for tiles that hold a received row. The computation must be able to finish while the combine
/// runs: on GPUs, launch it on another stream right before the combine, which gets few multiprocessors
/// (KernelOptions::num_sms). If a tile does not finish, the combine fails with kTimeout within the group's deadline.
struct TileSignals {
  /// [L, ceil(C / tile_rows)] i32, contiguous, in memory of the group's backend. Absent: all rows are final before the
  /// call (on GPUs, in stream order).
  ConstTensorView words{};
  std::int64_t tile_rows =
      0;  ///< at least 1: tile t of local expert l is its rows [t * tile_rows, (t + 1) * tile_rows)
  std::int32_t threshold = 0;  ///< at least 1: a tile is finished once its word is at least this
  bool present() const { return words.present(); }
};

/// Inputs of latency_combine on one rank.
struct LatencyCombineInput {
  ConstTensorView x{};  ///< [L, C, H] or [L*C, H] bf16 | f32: one output row per received row; other rows are not read
  /// [T, K] f32, contiguous, for this rank's own tokens. Absent: the weights given to latency_dispatch. A split call
  /// may read them until it is received, on GPUs too; there, with kRankSums, its send half also waits for the weights
  /// that the other ranks give here.
  ConstTensorView topk_weights{};
  /// Reports rows of x as final; may be given on some ranks only. A split call may read the words until it is received.
  /// Groups with GroupOptions::verify or mask_lost_ranks refuse them (kUnsupported: not yet).
  TileSignals signals{};
};

/// Outputs of latency_combine on one rank: the sums for its own tokens.
struct LatencyCombineOutput {
  TensorView x{};  ///< [T, H], dtype of the input; zero for a token without experts
};

struct LatencyCombineOptions {
  CombineOrder order = CombineOrder::kExact;  ///< the same on every rank
  bool split = false;                         ///< this call is the send half
  KernelOptions kernel{};
  TensorView wait_times_ns{};  ///< as in LatencyDispatchOptions
  /// kFp8: each rank's sum of its rows of a token, in fp32 and not rounded to bf16, is quantised as quantize_fp8
  /// (Fp8ScaleFormat::kFloat32) does it, also the sum of the token's own rank. The source, or the node, adds q * scale
  /// in f32, rounded once, in place of the rounded sum. NaNs and infinities as in CombineOptions::wire_format. The
  /// order is kRankSums, x is bf16, the group has no GroupOptions::verify (kUnsupported: not yet), and H is a multiple
  /// of 128 (kInvalidArgument). The same on every rank.
  WireFormat wire_format = WireFormat::kAsGiven;
};

/// Bounds on the calls of latency mode that a group will make.
struct LatencyShape {
  std::string backend = "cpu";          ///< a name from `ferry::backends()`
  int num_ranks = 1;                    ///< R
  std::int64_t max_tokens = 0;          ///< M
  int num_topk = 0;                     ///< K
  std::int64_t dispatch_row_bytes = 0;  ///< bytes of a row on the wire: x and its scales (after quantising, if any)
  std::int64_t combine_row_bytes = 0;   ///< of x; with WireFormat::kFp8 too, which needs no more
  /// Order of all combines; kRankSums needs fewer rows if K is more than R. kExact serves both.
  CombineOrder order = CombineOrder::kExact;
};

/// Smallest sufficient GroupOptions::latency_bytes for calls of this shape. 0 for backend "cpu", whose ranks read each
/// other's memory.
/// @errors kInvalidArgument: a negative or absurd number; kUnsupported: this build has no such backend
FERRY_API Result<std::size_t> latency_bytes_required(const LatencyShape& shape);

}  // namespace ferry

#endif  // FERRY_LATENCY_HPP
