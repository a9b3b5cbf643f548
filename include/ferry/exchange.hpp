#ifndef FERRY_EXCHANGE_HPP
#define FERRY_EXCHANGE_HPP

/// Inputs, outputs and options of `Group::dispatch` and `Group::combine`.
/// "rows" is `Routing::num_recv_rows()`. Payload rows are multiples of 16 bytes, 16-byte aligned, with any row stride
/// that is a multiple of 16 bytes; a [L, C, H] slab may be given as three dimensions or as [L*C, H].
///
/// An output may not share a byte with an input or with another output of the same call (kInvalidArgument): peers read
/// this rank's inputs while outputs are written. Rows of two tensors that alternate in memory share none. One
/// exception: in combine the sums may replace a bias that has the same address and row stride.

#include <array>

#include "ferry/quantization.hpp"
#include "ferry/types.hpp"

namespace ferry {

/// The size and the alignment of every payload row are multiples of this: the widest vector load of GPUs (PTX ISA,
/// ld.v4.b32) and the unit of their bulk copies (PTX ISA, cp.async.bulk).
inline constexpr std::int64_t kRowGranuleBytes = 16;

/// Inputs of dispatch on one rank.
struct DispatchInput {
  ConstTensorView x{};  ///< [T, H] any dtype: rows move as bytes; bf16 if dispatch quantises
  ConstTensorView
      scales{};  ///< [T, S] f32 | i32 | u8, any S >= 1, any strides; absent: none are sent, or quantising makes them
  /// [T, K] f32, contiguous: sent in place of the weights given to route (cached dispatch). Absent: those of route.
  ConstTensorView topk_weights{};
};

/// Outputs of dispatch on one rank. `x` is required, the others are filled when present. All ranks give the same set of
/// outputs.
struct DispatchOutput {
  TensorView x{};         ///< [rows, H], dtype of the input, or the quantised dtype of DispatchOptions::quantize
  TensorView scales{};    ///< [rows, S], dtype of the input's scales, any strides; present exactly if the input's are,
                          ///< or if dispatch quantises
  TensorView topk_idx{};  ///< kTokens only: [rows, K] i32 | i64, contiguous: local expert id; -1 where the expert is
                          ///< not on this rank, and in all rows past the used ones
  /// f32, contiguous. kTokens: [rows, K], 0 where the expert is not on this rank. kExperts, kSlab: [rows], the weight
  /// of (token, expert); duplicates are added in k order.
  TensorView topk_weights{};
  TensorView source{};  ///< [rows, 2] i32, contiguous: source rank and source token; -1 in rows that hold no token
};

/// How kernels copy rows. CUDA only, changes no result.
enum class CopyPath : std::int32_t {
  kAuto = 0,       ///< bulk copies where the device has them
  kBulk = 1,       ///< the bulk copy engine (PTX ISA, cp.async.bulk; sm_90 and later)
  kLoadStore = 2,  ///< 16-byte loads and stores by threads
};

/// Resources of a GPU that a call may use. CUDA only, changes no result, may differ by rank; 0 is the measured default
/// of docs/performance-gpus.md, and negative numbers are kInvalidArgument on every backend.
struct KernelOptions {
  int num_sms = 0;       ///< most multiprocessors that any kernel of the call uses, all its parts together
  int num_copy_sms = 0;  ///< part of num_sms that only moves rows between this rank's own buffers
  /// Tokens between two progress reports to the receivers; over several nodes, most tokens of a chunk that this rank
  /// sends to a rail peer. Latency mode inside a node has no such setting, and takes only num_sms.
  int chunk_tokens = 0;
  CopyPath copy_path = CopyPath::kAuto;
};

struct DispatchOptions {
  /// Clear the rows of `x`, `scales` and `topk_weights` that hold no token: kExperts' gaps, kSlab's unused capacity,
  /// rows past the used ones. Otherwise those are left untouched.
  bool zero_padding = false;
  KernelOptions kernel{};
  /// Quantise bf16 rows on their way, to the same bits as quantize_fp8 or quantize_int8 of x: one byte per channel
  /// travels instead of two. Output x is kFloat8E4M3 or kInt8. Output scales are [rows, ceil(H/128)] f32; for kFp8Ue8m0
  /// u8, or i32 [rows, ceil(H/512)]. H is a multiple of 16. The same on every rank. Takes T * (H + bytes of a row's
  /// scales) of staging memory; on a GPU, also a kernel ahead of the sending one.
  Quantization quantize = Quantization::kNone;
  /// CUDA: if the host learns only later that a call was refused (its Routing's rows are bounded), set `topk_idx` and
  /// `source` to -1 in every row instead of leaving them untouched: for programs that index with them at once. May
  /// differ by rank.
  bool clear_if_refused = false;
};

/// Inputs of combine on one rank.
struct CombineInput {
  ConstTensorView x{};  ///< [rows, H] bf16 | f32: one output row per received row; rows that hold no token are not read
  ConstTensorView
      weights;  ///< f32, contiguous, shaped as DispatchOutput::topk_weights: summed back as the second output
  std::array<ConstTensorView, 2> bias{};  ///< each [T, H], dtype of x: added to this rank's own tokens, before any row
  /// [T, K] f32, contiguous: weights of a weighted combine in place of those given to route. Absent: those of route.
  ConstTensorView topk_weights{};
};

/// Outputs of combine on one rank: the sums for its own tokens.
struct CombineOutput {
  TensorView x{};  ///< [T, H], dtype of the input; a token without experts gets the sum of its biases, or zero
  /// [T, K] f32, contiguous; present exactly if the input's weights are. kTokens: the sum, from +0 and in ascending
  /// order over all ranks that received the token, of the weight of its row there at k, also where k has no expert.
  /// kExperts, kSlab: the weight of the row of (token, expert k), 0 where k has no expert.
  TensorView weights{};
};

/// Format in which the rows of a combine travel between ranks.
enum class WireFormat : std::int32_t {
  kAsGiven = 0,  ///< the bits of the input
  kFp8 = 1,      ///< E4M3 and an f32 scale for 128 channels: about half the bytes of bf16
};

struct CombineOptions {
  /// false: a token is the sum of its rows, each distinct row once.
  /// true: the sum over its entries (t, k) with an expert of topk_weights[t, k] * row of that entry, by fused
  /// multiply-add. Both in fp32, from +0, biases first, then in ascending (rank, row, k), rounded once to nearest-even;
  /// over several nodes each node rounds its sum in this way, then the source adds the biases and the nodes' sums. A
  /// NaN sum has the bits 0x7FFF (bf16) or 0x7FFFFFFF (f32), whatever NaNs or infinities caused it: the NaN that GPUs
  /// produce (PTX ISA, cvt), not 0x7FC0 and 0x7FC00000 of x86 CPUs.
  bool weighted = false;
  KernelOptions kernel{};
  /// kFp8: every row, also one that stays on its rank, is quantised as quantize_fp8 (Fp8ScaleFormat::kFloat32) does it,
  /// and its value in the sum is q * scale in f32, rounded once; so the sums do not depend on where experts are. Biases
  /// and weights are not quantised. A NaN stays NaN; an infinity makes its block of 128 channels NaN, as its scale is
  /// infinite. H is a multiple of 128 (kInvalidArgument); groups of several nodes, and those with GroupOptions::verify,
  /// refuse it (kUnsupported: not yet). The same on every rank. Takes staging memory for all received rows, also where
  /// the input is symmetric memory.
  WireFormat wire_format = WireFormat::kAsGiven;
};

}  // namespace ferry

#endif  // FERRY_EXCHANGE_HPP
