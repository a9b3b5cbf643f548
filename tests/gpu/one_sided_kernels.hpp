#ifndef FERRY_TESTS_GPU_ONE_SIDED_KERNELS_HPP
#define FERRY_TESTS_GPU_ONE_SIDED_KERNELS_HPP

/// Kernels as users write them with ferry/device/one_sided.cuh. Each counts errors in *num_errors.

#include <cstddef>
#include <cstdint>

#include "ferry/device/world.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry::test {

enum class CallScope { kThread, kWarp, kBlock };

/// In each round, sends this rank's pattern to the next rank by put_signal, and checks the pattern of the previous
/// rank.
struct HandOnParams {
  device::World world;
  CallScope scope = CallScope::kThread;
  bool nbi = false;
  std::byte* row = nullptr;   ///< symmetric, two rows
  std::byte* mine = nullptr;  ///< two rows; symmetric or not
  std::uint64_t num_bytes = 0;
  std::uint64_t* came = nullptr;  ///< symmetric word: rows that have arrived here
  std::uint64_t* used = nullptr;  ///< symmetric word: rows of mine that the next rank has used
  int num_rounds = 1;
  int* num_errors = nullptr;
};
void launch_hand_on(const HandOnParams& params, Stream stream);

/// Every thread adds 1 to the word of rank 0 and signals the last rank; exactly one of all swaps the lock of rank 0.
struct CountParams {
  device::World world;
  std::uint64_t* word = nullptr;    ///< symmetric
  std::uint64_t* signal = nullptr;  ///< symmetric
  std::uint64_t* lock = nullptr;    ///< symmetric, initially 0
  unsigned num_blocks = 1;
  unsigned num_threads = 1;
  int num_rounds = 1;
  int* num_errors = nullptr;
};
void launch_count(const CountParams& params, Stream stream);

/// Every thread changes the first six of the words of rank 0 by each atomic, and rank 0's threads toggle bits of the
/// seventh. Then the block of each rank changes the eighth word of the next rank, which no other rank uses.
struct ChangeParams {
  device::World world;
  std::uint64_t* wide = nullptr;    ///< symmetric, [8], initially 0 but for wide[3], all of whose bits are set
  std::uint32_t* narrow = nullptr;  ///< the same
  int num_rounds = 1;
  int* num_errors = nullptr;
};
inline constexpr unsigned kChangeThreads = 32;  ///< one for each bit of a narrow word
void launch_change(const ChangeParams& params, Stream stream);

/// In each round, writes `value + round` into its own row, barrier, gets the next rank's row and checks it, barrier.
struct GatherParams {
  device::World world;
  device::TeamView team;
  std::uint64_t* row = nullptr;   ///< symmetric, [num_words]
  std::uint64_t* into = nullptr;  ///< [num_words]
  std::uint64_t num_words = 0;
  const std::uint64_t* value = nullptr;  ///< of this rank; each launch reads it again
  int num_rounds = 1;
  int* num_errors = nullptr;
};
void launch_gather(const GatherParams& params, Stream stream);

/// Store buffering. In each round ranks 0 and 1 put their own cell at the last rank, call quiet, and get the other's
/// cell; the values go to seen[2 * round + rank] of rank 0. Then every lane of a warp of each rank reserves room at
/// rank 0.
struct BufferParams {
  device::World world;
  device::TeamView team;
  CallScope scope = CallScope::kThread;
  std::uint64_t* cells = nullptr;  ///< symmetric, [2 * num_rounds]
  std::uint64_t* seen = nullptr;   ///< symmetric, [2 * num_rounds]
  std::uint64_t* room = nullptr;   ///< symmetric: room that warps reserve, 32 per round
  std::uint64_t* got = nullptr;    ///< memory of this rank
  int num_rounds = 1;
  int* num_errors = nullptr;
};
void launch_buffer(const BufferParams& params, Stream stream);

/// Launches a put outside of symmetric memory, which must be refused.
void launch_bad_put(const device::World& world, int* num_errors, Stream stream);

}  // namespace ferry::test

#endif  // FERRY_TESTS_GPU_ONE_SIDED_KERNELS_HPP
