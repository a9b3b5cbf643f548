#ifndef FERRY_CUDA_INTERNODE_PULL_CUH
#define FERRY_CUDA_INTERNODE_PULL_CUH

/// Takes a row of this rank, and the contents of the row's record, from the staging of a rank of its node.

#include "cuda/copy/warp_copy.cuh"
#include "cuda/internode/dispatch_params.hpp"
#include "cuda/internode/record.cuh"
#include "cuda/sync/flags.cuh"

namespace ferry::cuda::device {

/// Staging of a rank of the node.
struct PullHolder {
  const std::byte* rows;
  const std::byte* records;
};

template <typename Record>
__device__ void pull_scales(const ScaleTable& out, const Record& record, std::int64_t row) {
  std::byte* target = out.row(row);
  for (int column = lane_idx(); column < out.num_scales; column += kWarpLanes) {
    if (out.element_bytes == 4) {
      *reinterpret_cast<std::uint32_t*>(target + column * out.column_stride * 4) = record(column);
    } else {
      target[column * out.column_stride] = static_cast<std::byte>(record(column / 4) >> (column % 4 * 8));
    }
  }
}

/// kTokens: writes all K entries of the token; those of other ranks are -1 and 0. `expert`: expert of this lane's
/// entry.
template <typename Record>
__device__ void pull_entries(const PullParams& params, const Record& record, std::int64_t row, int expert) {
  if (lane_idx() >= params.num_topk) return;
  const std::int64_t at = row * params.num_topk + lane_idx();
  // Checked because ids come from other ranks.
  const bool mine = expert >= 0 && expert < params.num_experts && params.owner[expert] == params.group_rank;
  if (params.out.ids != nullptr) {
    const std::int32_t id = mine ? params.local_expert[expert] : -1;
    if (params.out.wide_ids) {
      static_cast<std::int64_t*>(params.out.ids)[at] = id;
    } else {
      static_cast<std::int32_t*>(params.out.ids)[at] = id;
    }
  }
  if (params.out.weights != nullptr) {
    params.out.weights[at] = mine ? __uint_as_float(record(params.format.weights_word + lane_idx())) : 0.0F;
  }
}

/// kExperts, kSlab: writes the weight of the row's expert; duplicates are added in topk order.
template <typename Record>
__device__ void pull_weight(const PullParams& params, const Record& record, std::int64_t row, int expert) {
  const unsigned holders = __ballot_sync(kAllLanes, lane_idx() < params.num_topk && expert == params.row_experts[row]);
  if (lane_idx() != 0) return;
  float sum = 0.0F;
  for (unsigned left = holders; left != 0; left &= left - 1) {
    const float weight = __uint_as_float(record(params.format.weights_word + __ffs(static_cast<int>(left)) - 1));
    sum = left == holders ? weight : __fadd_rn(sum, weight);  // not added to 0, so that a single -0 stays -0
  }
  params.out.weights[row] = sum;
}

/// Takes the contents of a row's record. One warp calls it.
template <typename Record>
__device__ void pull_record(const PullParams& params, const Record& record, std::int64_t row) {
  if (params.out.scales.data != nullptr) pull_scales(params.out.scales, record, row);
  if (!params.format.has_ids) return;
  int expert = -1;
  if (lane_idx() < params.num_topk) expert = static_cast<int>(record(params.format.ids_word + lane_idx()));
  if (params.row_experts == nullptr) {
    pull_entries(params, record, row, expert);
  } else if (params.out.weights != nullptr) {
    pull_weight(params, record, row, expert);
  }
}

/// Words of a record that a warp loads before it copies the row, so that both take one trip over the link: those of
/// 7168 channels in blocks of 128, 16 ids and 16 weights. Longer records are loaded where they are.
inline constexpr int kHeldWords = 96;

/// Takes one row. One warp calls it. `held` [kHeldWords]: shared memory of the warp.
__device__ inline void pull_row(const PullParams& params, const PullHolder& holder, std::int64_t row, std::int32_t item,
                                std::uint32_t* held) {
  constexpr int kLoads = kHeldWords / kWarpLanes;
  const int num_words = params.format.num_words;
  const auto* const record = reinterpret_cast<const std::uint32_t*>(holder.records + item * params.format.size_bytes());
  const bool holds = num_words <= kHeldWords;
  std::uint32_t words[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int at = i * kWarpLanes + lane_idx();
    if (holds && at < num_words) words[i] = record[at];
  }
  constexpr int kUnroll = 14;  // a row of 7168 FP8 channels is under way at once
  copy_by_warp<kUnroll>(params.out.x + row * params.out.x_stride, holder.rows + item * params.row_bytes,
                        params.row_bytes);
  if (num_words == 0) return;
  if (holds) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) held[i * kWarpLanes + lane_idx()] = words[i];
    __syncwarp();
  }
  pull_record(params, StoredRecord{holds ? held : record}, row);
  __syncwarp();  // before the next row's words
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTERNODE_PULL_CUH
