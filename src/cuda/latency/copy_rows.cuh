#ifndef FERRY_CUDA_LATENCY_COPY_ROWS_CUH
#define FERRY_CUDA_LATENCY_COPY_ROWS_CUH

/// Copies of rows that have arrived to the slab.

#include <cstddef>
#include <cstdint>

#include "cuda/latency/words.cuh"

namespace ferry::cuda::device {

/// Loads of a lane that are in flight together. With two instead of four a dispatch of 128 rows of 14 KiB took 0.6 us
/// longer between two H100, and smaller ones no less.
inline constexpr int kReceiveUnroll = 4;

/// A token in a warp: lane k holds its entry k.
struct Arrival {
  int source = 0;
  std::int64_t token = 0;
  int expert = -1;        ///< index among this rank's experts; -1: another rank's, or none
  int row = -1;           ///< row in that expert's slab
  unsigned here = 0;      ///< lanes that are the first of a row of this rank
  int rank_ordinal = -1;  ///< number of ranks below this one that the token goes to
  int slot = -1;          ///< row in the slab of the entry's rank, whichever that is
};

/// A part of the copy of a row, which `parts` warps share.
struct Share {
  int part = 0;
  int parts = 1;
};

/// Stores a lane's scale of a row, if it has one (`mine`), to all its rows in the slab. All lanes.
__device__ inline void store_scale(const DispatchReceiveRows& params, const Arrival& arrival, int column, bool mine,
                                   std::uint32_t value) {
  const SlabScales& scales = params.scales;
  const bool words = params.row.scale_bytes == sizeof(std::uint32_t);
#pragma unroll 1
  for (unsigned left = arrival.here; left != 0; left &= left - 1) {
    const int from_lane = __ffs(static_cast<int>(left)) - 1;
    const std::int64_t expert = __shfl_sync(kAllLanes, arrival.expert, from_lane);
    const std::int64_t row = __shfl_sync(kAllLanes, arrival.row, from_lane);
    const std::int64_t at = expert * scales.expert_stride + row * scales.row_stride + column * scales.column_stride;
    if (mine && words) reinterpret_cast<std::uint32_t*>(scales.data)[at] = value;
    if (mine && !words) scales.data[at] = static_cast<std::byte>(value);
  }
}

/// Copies this warp's share of a row that has arrived to all its rows in the slab.
__device__ inline void copy_arrival(const DispatchReceiveRows& params, const Arrival& arrival,
                                    const std::byte* window_row, const Share& share) {
  const int lane = lane_idx();
  const auto* from = reinterpret_cast<const uint4*>(window_row);
  const auto count = static_cast<int>(params.row.x_bytes / static_cast<std::int64_t>(sizeof(uint4)));
  constexpr int kStep = kReceiveUnroll * kWarpLanes;
#pragma unroll 1
  for (int first = share.part * kStep; first < count; first += share.parts * kStep) {
    uint4 values[kReceiveUnroll];
#pragma unroll
    for (int i = 0; i < kReceiveUnroll; ++i) {
      const int at = first + i * kWarpLanes + lane;
      if (at < count) values[i] = from[at];
    }
#pragma unroll 1
    for (unsigned left = arrival.here; left != 0; left &= left - 1) {
      const std::int64_t slot = __shfl_sync(kAllLanes, arrival.slot, __ffs(static_cast<int>(left)) - 1);
      auto* to = reinterpret_cast<uint4*>(params.x + slot * params.x_stride);
#pragma unroll
      for (int i = 0; i < kReceiveUnroll; ++i) {
        const int at = first + i * kWarpLanes + lane;
        if (at < count) to[at] = values[i];
      }
    }
  }
  // By the last warps first, of which a short row leaves some without a step above: no warp waits for both.
  const int part = share.parts - 1 - share.part;
  const std::byte* const scale_row = window_row + params.row.scales_offset();
#pragma unroll 1
  for (int first = part * kWarpLanes; first < params.row.num_scales; first += share.parts * kWarpLanes) {
    const int column = first + lane;
    const bool mine = column < params.row.num_scales;
    const bool words = params.row.scale_bytes == sizeof(std::uint32_t);
    std::uint32_t value = 0;
    if (mine && words) value = reinterpret_cast<const std::uint32_t*>(scale_row)[column];
    if (mine && !words) value = static_cast<std::uint32_t>(scale_row[column]);
    store_scale(params, arrival, column, mine, value);
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_COPY_ROWS_CUH
