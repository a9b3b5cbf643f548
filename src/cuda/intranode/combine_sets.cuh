#ifndef FERRY_CUDA_INTRANODE_COMBINE_SETS_CUH
#define FERRY_CUDA_INTRANODE_COMBINE_SETS_CUH

/// Sizes of the sets in which rows land to be summed, and the order in which warps take tokens. A set is the same piece
/// of all rows of a token; more rows make it shorter. How a row is cut into pieces, and how a set is added, depends on
/// the format of the rows: combine_plain_rows.cuh, combine_fp8_rows.cuh.

#include "cuda/copy/bulk_copy.cuh"
#include "cuda/intranode/combine_terms.cuh"

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

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_COMBINE_SETS_CUH
