#ifndef FERRY_CUDA_INTRANODE_STAGE_CHUNKS_HPP
#define FERRY_CUDA_INTRANODE_STAGE_CHUNKS_HPP

/// Where the rows that a rank stages for each of its peers are cut into chunks that it reports to them. The first chunk
/// is short, so that peers begin early, and so is the second. From then on each is as long as all before it, up to a
/// limit: peers sum more slowly than rows are staged, and have as many as that left.

#include <cstdint>

#include "plan/host_device.hpp"

namespace ferry::cuda {

struct StageChunks {
  int first_rows = 1;  ///< of each source; at most as many as `most_rows`
  int most_rows = 1;   ///< of a chunk

  /// Chunks behind the first one that are not longer than the limit, each as long as all before it.
  FERRY_HOST_DEVICE constexpr int num_doubling() const {
    int doubling = 1;
    while (first_rows <= most_rows >> doubling) ++doubling;
    return doubling;
  }
  /// First row behind a chunk, of any number of rows. `chunk` is one that some number of rows has.
  FERRY_HOST_DEVICE constexpr std::int64_t end_row(int chunk) const {
    const int doubling = num_doubling();
    const auto first = static_cast<std::int64_t>(first_rows);
    return chunk <= doubling ? first << chunk
                             : (first << doubling) + static_cast<std::int64_t>(chunk - doubling) * most_rows;
  }
  /// At least one.
  FERRY_HOST_DEVICE constexpr int num_chunks(std::int64_t num_rows) const {
    const int doubling = num_doubling();
    const std::int64_t rest = num_rows - (static_cast<std::int64_t>(first_rows) << doubling);
    if (rest > 0) return doubling + 1 + static_cast<int>((rest + most_rows - 1) / most_rows);
    int chunk = 0;
    while (end_row(chunk) < num_rows) ++chunk;
    return chunk + 1;
  }
};

/// Chunks of a length below 2^31 that are shorter than the limit, at the most.
inline constexpr int kMaxShortChunks = 32;

static_assert(StageChunks{4, 16}.end_row(0) == 4 && StageChunks{4, 16}.end_row(1) == 8);
static_assert(StageChunks{4, 16}.end_row(2) == 16 && StageChunks{4, 16}.end_row(3) == 32);
static_assert(StageChunks{4, 16}.end_row(4) == 48 && StageChunks{4, 16}.end_row(5) == 64);
static_assert(StageChunks{5, 5}.end_row(1) == 10 && StageChunks{5, 5}.end_row(3) == 20);
static_assert(StageChunks{3, 7}.end_row(2) == 12 && StageChunks{3, 7}.end_row(3) == 19);
static_assert(StageChunks{4, 16}.num_chunks(0) == 1 && StageChunks{4, 16}.num_chunks(4) == 1);
static_assert(StageChunks{4, 16}.num_chunks(5) == 2 && StageChunks{4, 16}.num_chunks(32) == 4);
static_assert(StageChunks{4, 16}.num_chunks(33) == 5 && StageChunks{4, 16}.num_chunks(49) == 6);
static_assert(StageChunks{5, 5}.num_chunks(10) == 2 && StageChunks{5, 5}.num_chunks(11) == 3);
static_assert(StageChunks{1, 0x7FFFFFFF}.num_doubling() < kMaxShortChunks);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTRANODE_STAGE_CHUNKS_HPP
