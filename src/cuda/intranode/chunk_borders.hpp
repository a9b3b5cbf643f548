#ifndef FERRY_CUDA_INTRANODE_CHUNK_BORDERS_HPP
#define FERRY_CUDA_INTRANODE_CHUNK_BORDERS_HPP

/// Borders of the chunks in which a rank reports its tokens, or its rows for each other rank, to receivers. A chunk is
/// a whole number of blocks: blocks of route's count for tokens, blocks of kBorderRows rows for rows. All chunks are
/// equal except the last, which is halved repeatedly, so that receivers that copy reported chunks finish soon after the
/// sender.

#include "plan/host_device.hpp"

namespace ferry::cuda {

inline constexpr int kBorderRows = 32;

struct ChunkBorders {
  int num_blocks = 1;    ///< at least one
  int chunk_blocks = 1;  ///< blocks in an undivided chunk

  FERRY_HOST_DEVICE constexpr int num_whole() const { return (num_blocks - 1) / chunk_blocks; }
  /// Blocks of the chunk that is halved, 1 to chunk_blocks.
  FERRY_HOST_DEVICE constexpr int num_rest() const { return num_blocks - num_whole() * chunk_blocks; }
  FERRY_HOST_DEVICE constexpr int num_chunks() const {
    int halves = 0;
    for (int rest = num_rest(); rest > 0; rest /= 2) ++halves;
    return num_whole() + halves;
  }
  /// First block after a chunk.
  FERRY_HOST_DEVICE constexpr int end_block(int chunk) const {
    const int half = chunk - num_whole();
    return half < 0 ? (chunk + 1) * chunk_blocks : num_blocks - (num_rest() >> (half + 1));
  }
  FERRY_HOST_DEVICE constexpr int chunk_of(int block) const {
    if (block < num_whole() * chunk_blocks) return block / chunk_blocks;
    int chunk = num_whole();
    while (block >= end_block(chunk)) ++chunk;
    return chunk;
  }
};

static_assert(ChunkBorders{1, 8}.num_chunks() == 1 && ChunkBorders{1, 8}.end_block(0) == 1);
static_assert(ChunkBorders{16, 8}.num_chunks() == 5 && ChunkBorders{16, 8}.end_block(0) == 8);
static_assert(ChunkBorders{16, 8}.end_block(1) == 12 && ChunkBorders{16, 8}.end_block(4) == 16);
static_assert(ChunkBorders{16, 8}.chunk_of(7) == 0 && ChunkBorders{16, 8}.chunk_of(8) == 1);
static_assert(ChunkBorders{16, 8}.chunk_of(14) == 3 && ChunkBorders{16, 8}.chunk_of(15) == 4);
static_assert(ChunkBorders{11, 8}.num_chunks() == 3 && ChunkBorders{11, 8}.end_block(1) == 10);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTRANODE_CHUNK_BORDERS_HPP
