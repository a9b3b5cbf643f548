#ifndef FERRY_CUDA_KERNELS_COMBINE_SUM_CUH
#define FERRY_CUDA_KERNELS_COMBINE_SUM_CUH

/// Summing warps. Each takes every n-th token: finds its rows, then adds them up 16 bytes a lane, all rows of a step
/// loaded before the first is added.

#include <cuda_bf16.h>

#include "cuda/device/chunks.cuh"
#include "cuda/kernels/combine.hpp"
#include "ferry/routing.hpp"

namespace ferry::cuda::device {

inline constexpr int kCombineWarps = 12;
inline constexpr int kCombineThreads = kCombineWarps * kWarpLanes;
inline constexpr int kMaxBiases = 2;
/// Rows that one token can have: each entry's own, and the biases.
inline constexpr int kMaxTerms = kMaxTopk + kMaxBiases;

/// What a token is the sum of, in order. In shared memory, one per warp.
struct Terms {
  const std::byte* rows[kMaxTerms];
  std::uint8_t first_weight[kMaxTerms + 1];  ///< where a row's weights begin in `weights`
  float weights[kMaxTerms];
};

/// Where a rank's rows are, for this rank. In shared memory, one per rank.
struct Holder {
  const std::byte* rows;
  std::int64_t row_stride;
  const float* weights;
  std::int64_t staged;  ///< 1: wait for progress
};

__device__ inline void find_holders(const CombineParams& params, Holder* holders) {
  const CrewParams& crew = params.crew;
  for (int rank = static_cast<int>(threadIdx.x); rank < crew.num_ranks; rank += kCombineThreads) {
    const volatile EntryMessage& message = crew.control.messages[rank];
    const std::byte* base = crew.peer_bases[rank];
    const bool self = rank == crew.rank;
    holders[rank] = {self ? params.x : base + message.rows_offset,
                     self ? params.x_stride : static_cast<std::int64_t>(message.rows_stride),
                     reinterpret_cast<const float*>(base + message.records_offset),
                     !self && message.rows_are_staged != 0 ? 1 : 0};
  }
  __syncthreads();
}

/// 16 bytes of a row: 8 bf16 or 4 f32.
template <bool kFloat32>
struct Vector {
  static constexpr int kWidth = kFloat32 ? 4 : 8;
  float values[kWidth];

  __device__ void clear() {
#pragma unroll
    for (float& value : values) value = 0.0F;
  }
  __device__ void add(const uint4& raw, float weight) {
    const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kFloat32) {
        values[i] = __fmaf_rn(weight, __uint_as_float(words[i]), values[i]);
      } else {
        values[2 * i] = __fmaf_rn(weight, __uint_as_float(words[i] << 16), values[2 * i]);
        values[2 * i + 1] = __fmaf_rn(weight, __uint_as_float(words[i] & 0xFFFF0000U), values[2 * i + 1]);
      }
    }
  }
  /// Rounded to nearest-even; NaN becomes the canonical quiet one of either type.
  __device__ uint4 round() const {
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kFloat32) {
        words[i] = isnan(values[i]) ? 0x7FFFFFFFU : __float_as_uint(values[i]);
      } else {
        const auto low = static_cast<std::uint32_t>(round_bf16(values[2 * i]));
        const auto high = static_cast<std::uint32_t>(round_bf16(values[2 * i + 1]));
        words[i] = low | high << 16;
      }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

 private:
  __device__ static std::uint16_t round_bf16(float value) {
    return isnan(value) ? std::uint16_t{0x7FFF} : __bfloat16_as_ushort(__float2bfloat16_rn(value));
  }
};

/// A peer's memory: not kept in the first-level cache, where it would outlive the call.
__device__ inline uint4 load_row(const std::byte* address) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address)
               : "memory");
  return value;
}

/// Adds rows [first, first + kRows) of `terms`, those that exist, to kSteps vectors, 512 bytes apart.
template <bool kFloat32, int kRows, int kSteps>
__device__ inline void add_rows(const Terms& terms, int first, int num_rows, std::int64_t offset,
                                std::int64_t row_bytes, Vector<kFloat32> (&sums)[kSteps]) {
  constexpr std::int64_t kStepBytes = kWarpLanes * sizeof(uint4);
  uint4 raw[kRows][kSteps];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::int64_t at = offset + step * kStepBytes;
      if (first + row < num_rows && at < row_bytes) raw[row][step] = load_row(terms.rows[first + row] + at);
    }
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    if (first + row >= num_rows) break;
    for (int i = terms.first_weight[first + row]; i < terms.first_weight[first + row + 1]; ++i) {
      const float weight = terms.weights[i];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (offset + step * kStepBytes < row_bytes) sums[step].add(raw[row][step], weight);
      }
    }
  }
}

/// out = the sum of all terms, one warp.
template <bool kFloat32, int kRows, int kSteps>
__device__ inline void sum_row(const Terms& terms, int num_rows, std::byte* out, std::int64_t row_bytes) {
  constexpr std::int64_t kStepBytes = kWarpLanes * sizeof(uint4);
  for (std::int64_t offset = lane_idx() * static_cast<std::int64_t>(sizeof(uint4)); offset < row_bytes;
       offset += kSteps * kStepBytes) {
    Vector<kFloat32> sums[kSteps];
#pragma unroll
    for (Vector<kFloat32>& sum : sums) sum.clear();
    for (int first = 0; first < num_rows; first += kRows) {
      add_rows<kFloat32, kRows, kSteps>(terms, first, num_rows, offset, row_bytes, sums);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::int64_t at = offset + step * kStepBytes;
      if (at < row_bytes) *reinterpret_cast<uint4*>(out + at) = sums[step].round();
    }
  }
}

template <bool kFloat32>
class Summing {
 public:
  __device__ Summing(const CombineParams& params, const Holder* holders, Terms* terms, std::uint64_t epoch)
      : params_(params), holders_(holders), terms_(*terms), epoch_(epoch) {}

  /// False when the group broke. All lanes.
  __device__ bool sum_token(std::int64_t token) {
    Place place{};
    place.rank = -1;
    if (lane_idx() < params_.num_topk) {
      const uint4 raw = reinterpret_cast<const uint4*>(params_.places)[token * params_.num_topk + lane_idx()];
      place = *reinterpret_cast<const Place*>(&raw);
    }
    if (!await_rows(place)) return false;
    const int num_rows = collect_terms(token, place);
    std::byte* out = params_.out_x + token * params_.out_stride;
    // As many loads at once as registers hold: two shapes, for few and for many rows.
    if (num_rows <= 4) {
      sum_row<kFloat32, 4, 3>(terms_, num_rows, out, params_.row_bytes);
    } else {
      sum_row<kFloat32, 8, 2>(terms_, num_rows, out, params_.row_bytes);
    }
    if (params_.out_weights != nullptr) sum_weights(token, place);
    __syncwarp();
    return true;
  }

 private:
  /// Waits until the rows of all places are where this rank can read them.
  __device__ bool await_rows(const Place& place) {
    bool here = true;
    if (place.rank >= 0 && holders_[place.rank].staged != 0) {
      const std::int32_t sent = params_.block_ranks[params_.num_blocks * params_.crew.num_ranks + place.rank];
      const std::int32_t needed =
          params_.one_row_per_token ? place.token_row - params_.rank_base[place.rank] + 1 : sent;
      here = wait_flag(params_.crew, {Awaited::kRows, place.rank, epoch_}, params_.crew.control.progress + place.rank,
                       progress_value(epoch_, needed));
    }
    return __all_sync(0xFFFFFFFFU, here) != 0;
  }

  /// Fills terms_; returns the number of rows.
  __device__ int collect_terms(std::int64_t token, const Place& place) {
    int num_rows = 0;
    for (const BiasRows& bias : params_.bias) {
      if (bias.data == nullptr) continue;
      if (lane_idx() == 0) {
        terms_.rows[num_rows] = bias.data + token * bias.stride;
        terms_.first_weight[num_rows] = static_cast<std::uint8_t>(num_rows);
        terms_.weights[num_rows] = 1.0F;  // fma(1, b, acc) is acc + b
      }
      ++num_rows;
    }
    const bool first = place.rank >= 0 && (place.flags & kFirstOfRow) != 0;
    const bool counts = params_.weighted ? place.rank >= 0 : first;
    const unsigned rows = __ballot_sync(0xFFFFFFFFU, first);
    const unsigned weights = __ballot_sync(0xFFFFFFFFU, counts);
    const unsigned below = (1U << lane_idx()) - 1U;
    const int weight_idx = num_rows + __popc(weights & below);
    if (first) {
      const Holder& holder = holders_[place.rank];
      const int row_idx = num_rows + __popc(rows & below);
      terms_.rows[row_idx] = holder.rows + place.row * holder.row_stride;
      terms_.first_weight[row_idx] = static_cast<std::uint8_t>(weight_idx);
    }
    if (counts) {
      terms_.weights[weight_idx] =
          params_.weighted ? params_.topk_weights[token * params_.num_topk + place.topk] : 1.0F;
    }
    if (lane_idx() == 0) {
      terms_.first_weight[num_rows + __popc(rows)] = static_cast<std::uint8_t>(num_rows + __popc(weights));
    }
    __syncwarp();
    return num_rows + __popc(rows);
  }

  /// kTokens: entry k is the sum over all ranks of what they returned at k. Else: the weight of the entry's own row.
  __device__ void sum_weights(std::int64_t token, const Place& place) {
    float* out = params_.out_weights + token * params_.num_topk;
    if (!params_.one_row_per_token) {
      // Entries without an expert have no place: clear first.
      if (lane_idx() < params_.num_topk) out[lane_idx()] = 0.0F;
      __syncwarp();
      if (place.rank >= 0) out[place.topk] = load_weight(holders_[place.rank].weights + place.row);
      return;
    }
    float sum = 0.0F;
    const unsigned rows = __ballot_sync(0xFFFFFFFFU, place.rank >= 0 && (place.flags & kFirstOfRow) != 0);
    for (unsigned left = rows; left != 0; left &= left - 1) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      const int rank = __shfl_sync(0xFFFFFFFFU, static_cast<int>(place.rank), lane);
      const std::int64_t row = __shfl_sync(0xFFFFFFFFU, place.row, lane);
      if (lane_idx() < params_.num_topk) {
        sum = __fadd_rn(sum, load_weight(holders_[rank].weights + row * params_.num_topk + lane_idx()));
      }
    }
    if (lane_idx() < params_.num_topk) out[lane_idx()] = sum;
  }

  __device__ static float load_weight(const float* address) { return *static_cast<const volatile float*>(address); }

  const CombineParams& params_;
  const Holder* holders_;
  Terms& terms_;
  std::uint64_t epoch_;
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_KERNELS_COMBINE_SUM_CUH
