#ifndef FERRY_CUDA_INTRANODE_DISPATCH_UNPACK_CUH
#define FERRY_CUDA_INTRANODE_DISPATCH_UNPACK_CUH

/// Unpacks a token's record into this rank's outputs, by one warp. All lanes call each function.

#include "cuda/intranode/dispatch_stages.cuh"

namespace ferry::cuda::device {

__device__ inline const std::uint32_t* record_in_memory(const DispatchParams& params, std::int32_t token_row) {
  return reinterpret_cast<const std::uint32_t*>(params.records + token_row * params.record.size_bytes());
}

/// Final row of this lane's entry of a token row; -1 if the lane has no entry. `words` is the record, if there is one.
__device__ inline std::int32_t find_rows(const DispatchParams& params, const std::uint32_t* words,
                                         std::int32_t token_row) {
  if (params.one_row_per_token) return lane_idx() == 0 ? token_row : -1;
  return lane_idx() < params.num_topk ? static_cast<std::int32_t>(words[params.record.rows_word + lane_idx()]) : -1;
}

/// Mask of the lanes that are the first to hold their row.
__device__ inline unsigned first_holders(std::int32_t rows) {
  const unsigned same = __match_any_sync(0xFFFFFFFFU, rows);
  return __ballot_sync(0xFFFFFFFFU, rows >= 0 && __ffs(static_cast<int>(same)) - 1 == lane_idx());
}

__device__ inline void unpack_scales(const ScaleTable& out, const std::uint32_t* words, std::int64_t row) {
  std::byte* target = out.data + row * out.row_stride * out.element_bytes;
  for (int i = lane_idx(); i < out.num_scales; i += kWarpLanes) {
    if (out.element_bytes == 4) {
      *reinterpret_cast<std::uint32_t*>(target + i * out.column_stride * 4) = words[i];
    } else {
      target[i * out.column_stride] = reinterpret_cast<const std::byte*>(words)[i];
    }
  }
}

/// Writes the weight of (token, expert), whose row is `row`. The weights of duplicates are added in topk order.
__device__ inline void unpack_row_weight(const DispatchParams& params, const std::uint32_t* words, std::int32_t rows,
                                         std::int32_t row) {
  const unsigned holders = __ballot_sync(0xFFFFFFFFU, rows == row);
  if (lane_idx() != 0) return;
  float sum = 0.0F;
  for (unsigned left = holders; left != 0; left &= left - 1) {
    const float weight = __uint_as_float(words[params.record.weights_word + __ffs(static_cast<int>(left)) - 1]);
    sum = left == holders ? weight : __fadd_rn(sum, weight);  // not added to 0, so that a single -0 stays -0
  }
  params.out.weights[row] = sum;
}

/// kTokens: writes one entry of a row.
__device__ inline void unpack_entry(const DispatchParams& params, const std::uint32_t* words, std::int64_t row,
                                    int topk) {
  const std::int64_t at = row * params.num_topk + topk;
  if (params.out.ids != nullptr) {
    const auto local = static_cast<std::int32_t>(words[params.record.ids_word + topk]);
    if (params.out.wide_ids) {
      static_cast<std::int64_t*>(params.out.ids)[at] = local;
    } else {
      static_cast<std::int32_t*>(params.out.ids)[at] = local;
    }
  }
  if (params.out.weights != nullptr) {
    params.out.weights[at] = __uint_as_float(words[params.record.weights_word + topk]);
  }
}

/// Writes scales, ids and weights of one token row. `rows`: from find_rows.
__device__ inline void unpack(const DispatchParams& params, const std::uint32_t* words, std::int32_t token_row,
                              std::int32_t rows) {
  for (unsigned left = first_holders(rows); left != 0; left &= left - 1) {
    const std::int32_t row = __shfl_sync(0xFFFFFFFFU, rows, __ffs(static_cast<int>(left)) - 1);
    if (params.out.scales.data != nullptr) unpack_scales(params.out.scales, words, row);
    if (params.out.weights != nullptr && !params.one_row_per_token) unpack_row_weight(params, words, rows, row);
  }
  if (params.one_row_per_token && lane_idx() < params.num_topk) unpack_entry(params, words, token_row, lane_idx());
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_DISPATCH_UNPACK_CUH
