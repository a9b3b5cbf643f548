#ifndef FERRY_CUDA_LATENCY_TILE_WAIT_CUH
#define FERRY_CUDA_LATENCY_TILE_WAIT_CUH

/// Waits for rows of a combine's input that another kernel is still computing (TileSignals).

#include <cstdint>

#include "cuda/latency/params.hpp"
#include "cuda/latency/turns.cuh"
#include "cuda/sync/flags.cuh"
#include "cuda/sync/rank_sync.cuh"

namespace ferry::cuda::device {

/// Reads a tile's word, which counts from 0.
__device__ inline std::uint64_t load_tile(const std::uint32_t* word) {
  const auto value = static_cast<std::int32_t>(load_acquire_device(word));
  return static_cast<std::uint64_t>(value < 0 ? 0 : value);
}

/// Waits for a tile that is not finished. Not inlined, so that kernels grow little.
__device__ __noinline__ inline bool poll_tile(const LatencyParams& call, const Wait& wait, const std::uint32_t* word,
                                              std::uint64_t threshold) {
  return wait_until(
      call.ranks, wait, [word] { return load_tile(word); }, threshold);
}

/// Waits until a tile is finished; false when the group broke. One thread, which then sees its rows.
__device__ inline bool await_tile(const LatencyParams& call, const TileWords& tiles, std::int32_t expert,
                                  std::int32_t tile) {
  const auto* const word = reinterpret_cast<const std::uint32_t*>(tiles.words) + expert * tiles.tiles_per_expert + tile;
  const auto threshold = static_cast<std::uint64_t>(tiles.threshold);
  if (load_tile(word) >= threshold) return true;
  return poll_tile(call, {Awaited::kTile, call.ranks.rank, pack_tile(expert, tile)}, word, threshold);
}

/// Waits until the tiles of this lane's and all other lanes' rows are finished; false when the group broke. `row`: of
/// the slab; -1: none. All lanes of a warp, which then see those rows. Not inlined, so that kernels grow little.
__device__ __noinline__ inline bool await_tiles(const LatencyParams& call, const TileWords& tiles, std::int32_t row) {
  bool came = true;
  if (row >= 0) {
    const auto capacity = static_cast<std::int32_t>(call.slab_capacity);
    const std::int32_t expert = row / capacity;
    came = await_tile(call, tiles, expert, (row - expert * capacity) / tiles.tile_rows);
  }
  const bool all = __all_sync(kAllLanes, static_cast<int>(came)) != 0;
  __syncwarp();
  return all;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_TILE_WAIT_CUH
