#ifndef FERRY_EXCHANGE_HPP
#define FERRY_EXCHANGE_HPP

/// Inputs, outputs and options of `Group::dispatch` and `Group::combine`.
/// "rows" is `Routing::num_recv_rows()`. Payload rows are whole multiples of 16 bytes, 16-byte aligned, with any row
/// stride that is a multiple of 16 bytes; a [L, C, H] slab may be given as three dimensions or as [L*C, H].
///
/// An output may not share a byte with an input or with another output of the same call (kInvalidArgument): peers read
/// this rank's inputs while outputs are written. Rows that alternate in memory share none. One exception: in combine
/// the sums may replace a bias, where both have the same address and row stride.

#include <array>

#include "ferry/quantization.hpp"
#include "ferry/types.hpp"

namespace ferry {

/// The size and the alignment of every payload row are multiples of this: the widest vector load of GPUs (PTX ISA,
/// ld.v4.b32) and the unit of their bulk copies (PTX ISA, cp.async.bulk).
inline constexpr std::int64_t kRowGranuleBytes = 16;

/// What one rank sends.
struct DispatchInput {
  ConstTensorView x{};  ///< [T, H] any dtype: rows move as bytes; bf16 where dispatch quantises
  ConstTensorView
      scales{};  ///< [T, S] f32 | i32 | u8, any S >= 1, any strides; absent: none are sent, or quantising makes them
  /// [T, K] f32, contiguous: sent in place of the weights given to route (cached dispatch). Absent: those of route.
  ConstTensorView topk_weights{};
};

/// Where one rank receives. `x` is required, the others are filled when present. All ranks give the same set of
/// outputs.
struct DispatchOutput {
  TensorView x{};         ///< [rows, H], dtype of the input, or what DispatchOptions::quantize makes of it
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

/// How much of a GPU a call uses. CUDA only, changes no result, may differ by rank; 0 is the measured default of
/// docs/performance-gpus.md.
struct KernelOptions {
  int num_sms = 0;       ///< the most multiprocessors that any kernel of the call uses, all its parts together
  int num_copy_sms = 0;  ///< of those, the ones that only move rows between this rank's own buffers
  int chunk_tokens = 0;  ///< tokens between two progress reports to the receivers
  CopyPath copy_path = CopyPath::kAuto;
};

struct DispatchOptions {
  /// Clear the rows of `x`, `scales` and `topk_weights` that hold no token: kExperts' gaps, kSlab's unused capacity,
  /// rows past the used ones. Otherwise those are left untouched.
  bool zero_padding = false;
  KernelOptions kernel{};
  /// Quantise bf16 rows on their way, with the bits that quantize_fp8 or quantize_int8 of x would give: one byte per
  /// channel travels instead of two. Output x is kFloat8E4M3 or kInt8. Output scales are [rows, ceil(H/128)] f32; for
  /// kFp8Ue8m0 u8, or i32 [rows, ceil(H/512)]. H is a multiple of 16. The same on every rank.
  /// Takes T * (H + bytes of a row's scales) of staging memory; on a GPU, a kernel ahead of the one that sends.
  Quantization quantize = Quantization::kNone;
  /// CUDA: where the host learns later that a call was refused (its Routing's rows are bounded), its `topk_idx` and
  /// `source` become -1 in every row instead of staying untouched: for programs that go on to index with them. May
  /// differ by rank.
  bool clear_if_refused = false;
};

/// What one rank returns to the sources.
struct CombineInput {
  ConstTensorView x{};  ///< [rows, H] bf16 | f32: one output row per received row; rows that hold no token are not read
  ConstTensorView
      weights;  ///< f32, contiguous, shaped as DispatchOutput::topk_weights: summed back as the second output
  std::array<ConstTensorView, 2> bias{};  ///< each [T, H], dtype of x: added to this rank's own tokens, before any row
  /// [T, K] f32, contiguous: weights of a weighted combine in place of those given to route. Absent: those of route.
  ConstTensorView topk_weights{};
};

/// Where one rank receives the sums for its own tokens.
struct CombineOutput {
  TensorView x{};  ///< [T, H], dtype of the input; a token without experts gets the sum of its biases, or zero
  /// [T, K] f32, contiguous; present exactly if the input's weights are. kTokens: the sum, from +0 over all ranks that
  /// the token went to in ascending order, of the weights of its row there at k, also where k has no expert. kExperts,
  /// kSlab: the weight of the row of (token, expert k), 0 where k has no expert.
  TensorView weights{};
};

struct CombineOptions {
  /// false: a token is the sum of its rows, each distinct row once.
  /// true: the sum over its entries (t, k) with an expert of topk_weights[t, k] * row of that entry, by fused
  /// multiply-add. Both in fp32, from +0, biases first, then in ascending (rank, row, k), rounded once to nearest-even;
  /// over several nodes each node rounds its sum in this way, then the source adds biases and the nodes' sums up. A sum
  /// that is NaN has the bits 0x7FFF (bf16) or 0x7FFFFFFF (f32), whatever NaN or infinities it comes from: the NaN that
  /// GPUs make (PTX ISA, cvt), not the 0x7FC0 and 0x7FC00000 that x86 CPUs do.
  bool weighted = false;
  KernelOptions kernel{};
};

}  // namespace ferry

#endif  // FERRY_EXCHANGE_HPP
