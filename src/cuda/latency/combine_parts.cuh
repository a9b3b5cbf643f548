#ifndef FERRY_CUDA_LATENCY_COMBINE_PARTS_CUH
#define FERRY_CUDA_LATENCY_COMBINE_PARTS_CUH

/// Division of a combine's work among warps, in both halves.

#include <cstdint>

#include "cuda/latency/far_message.hpp"
#include "cuda/latency/turns.cuh"

namespace ferry::cuda::device {

/// The first block of a combine adds up nothing: it posts this rank's header to the peers, grants the owed set
/// (turns.cuh), and reports. The call ends with the last block that adds up, so those blocks do nothing else.
__device__ inline bool is_clerk() { return blockIdx.x == 0; }

/// Warps of a block that add up rows, in either half. One more, the first, meanwhile waits for the call's turn, and
/// notifies the peers when everything is sent.
inline constexpr int kCombineWarps = 15;
inline constexpr int kCombineThreads = (kCombineWarps + 1) * kWarpLanes;

/// First loads of a combine's kernel, all at once. Through the first-level cache: all warps of all blocks load them,
/// and the second-level cache serves a single line slowly.
struct CombineStart {
  bool routed = false;  ///< the dispatch was not refused
  int most_tokens = 0;  ///< largest T of any rank, if routed

  __device__ static CombineStart of(const LatencyParams& call) {
    const std::uint32_t valid = call.tables.summary->valid;
    const std::int32_t most_tokens = *call.tables.most_tokens;
    // Behind a kernel in which the group broke the values are arbitrary; the wait for the call's turn finds that out.
    return {valid != 0, max(0, min(most_tokens, static_cast<int>(call.max_tokens)))};
  }
};

/// First unit of a warp, among those that all blocks share; its others follow all_combine_warps() apart.
__device__ inline int num_adding_blocks() { return static_cast<int>(gridDim.x) - 1; }
__device__ inline int all_combine_warps() { return num_adding_blocks() * kCombineWarps; }
__device__ inline int first_unit_of(int block) { return (warp_idx() - 1) * num_adding_blocks() + block - 1; }
__device__ inline int first_combine_unit() { return first_unit_of(static_cast<int>(blockIdx.x)); }

/// Cut of rows into parts of full steps of a warp, so that all warps have work in small batches. There are more parts
/// than rows only if there are more warps, so units are counted in 32 bits, in which divisions are fast; a row has
/// fewer bytes than that too.
struct RowParts {
  static constexpr int kStepBytes = kWordLineBytes;  ///< of rows that do not travel as words

  int num_parts = 1;
  int part_bytes = kStepBytes;

  FERRY_HOST_DEVICE static constexpr RowParts of(std::int64_t row_bytes, int num_rows, int num_warps,
                                                 int step_bytes = kStepBytes) {
    const int num_steps = static_cast<int>((row_bytes + step_bytes - 1) / step_bytes);
    const int fair = num_rows == 0 ? 1 : num_warps / num_rows;
    const int wanted = fair < 1 ? 1 : fair > num_steps ? num_steps : fair;
    const int steps_per_part = (num_steps + wanted - 1) / wanted;
    return {(num_steps + steps_per_part - 1) / steps_per_part, steps_per_part * step_bytes};
  }
};

/// One warp's share at a time.
struct RowPart {
  int begin = 0;
  int bytes = 0;

  FERRY_HOST_DEVICE static constexpr RowPart of(const RowParts& parts, std::int64_t row_bytes, int part) {
    const int begin = part * parts.part_bytes;
    const int left = static_cast<int>(row_bytes) - begin;
    return {begin, left < parts.part_bytes ? left : parts.part_bytes};
  }
};

/// Units of a send half: (token of its source, source, part of the row). Sources count from the sender itself, so that
/// senders begin with different ones. Unit u belongs to block u % num_blocks.
struct SendUnits {
  RowParts parts;
  int num_units = 0;

  /// `max_tokens`: the largest T of any rank in this call.
  FERRY_HOST_DEVICE static constexpr SendUnits of(std::int64_t row_bytes, int max_tokens, int num_ranks, int num_blocks,
                                                  int step_bytes) {
    const int num_rows = max_tokens * num_ranks;  // less than 2^20 * 128
    const RowParts parts = RowParts::of(row_bytes, num_rows, num_blocks * kCombineWarps, step_bytes);
    return {parts, num_rows * parts.num_parts};
  }
};

/// Rows of one combine in a set: the row of the token's rank number `ordinal`, or of entry `topk`.
struct CombineWindow {
  std::byte* rows = nullptr;
  std::int64_t row_stride = 0;
  int rows_per_token = 1;

  __device__ static CombineWindow at(const LatencyParams& call, const CombineRows& rows, int rank, int set) {
    const int per_token = num_returned_rows(rows.order, call.num_topk, call.ranks.num_ranks);
    return {window_of(call, rank).rows(call.layout, LatencyKind::kCombine, set), rows.wire_stride(), per_token};
  }
  __device__ std::byte* row(std::int64_t token, int idx) const {
    return rows + (token * rows_per_token + idx) * row_stride;
  }
};

/// Stride of the rows that a combine of any number of tokens returns to other nodes if they are words, else 0. The same
/// on every rank.
__device__ inline std::int64_t return_word_stride(const LatencyParams& call, const CombineRows& rows,
                                                  const FarLayout& layout) {
  if (rows.fp8()) return 0;
  const std::int64_t most_tokens = *call.tables.most_tokens;  // T of any rank
  const int rows_per_token = num_returned_rows(rows.order, call.num_topk, call.ranks.num_ranks);
  return far_word_stride(rows.row_bytes, {most_tokens, most_tokens * rows_per_token, layout.return_words_bytes});
}

/// Vectors of a step of a sum where all sums travel as words, also between nodes.
template <RowKind kKind>
inline constexpr int kFarSumVectors = kKind == RowKind::kFp8Sums ? kFp8StepVectors : kFarStepVectors;

/// Bytes of a step of rows of which `words` travel as words, or `far_words` as words to other nodes.
template <RowKind kKind>
__device__ inline int part_step_bytes(bool words, bool far_words) {
  if constexpr (kKind == RowKind::kFp8Sums) return kFp8StepBytes;
  if (far_words) return kFarStepVectors * kWordLineBytes;
  return words ? kWordStepVectors * kWordLineBytes : RowParts::kStepBytes;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_COMBINE_PARTS_CUH
