#ifndef FERRY_TESTS_UCX_CARD_GPU_MOVER_RING_HPP
#define FERRY_TESTS_UCX_CARD_GPU_MOVER_RING_HPP

/// Memory by which the host and the kernel of a mover (gpu_mover.hpp) speak. Commands have numbers from 1 on.

#include <cuda.h>

#include <cstddef>
#include <cstdint>

namespace ferry::ucx_card {

inline constexpr unsigned kMoverBlocks = 8;
inline constexpr unsigned kMoverThreads = 18 * 32;  ///< of a block
inline constexpr std::size_t kMoverCommands = 256;  ///< under way at most

/// Each word has half a number and, in its upper half, the number of the command, so that a reader knows which words
/// are there: halves of `to`, `from` and `num_bytes`, the lower one first, and two zeros.
struct alignas(64) MoverCommand {
  std::uint64_t words[8];
};

/// In memory of the host, which the GPU reads and writes.
struct MoverRing {
  MoverCommand commands[kMoverCommands];             ///< that of number n at n modulo their count
  alignas(128) std::uint64_t is_done[kMoverBlocks];  ///< each block: all commands up to this are done
  alignas(128) std::uint64_t next;                   ///< as it ends: the first command it has not taken
  std::uint64_t ended;                               ///< the last launch that takes no more
};

/// The kernel for the current context, loaded. Its arguments: MoverRing*; MoverCommand*, as many in the GPU's memory,
/// zero before the first launch; the first command, std::uint64_t; the number of the launch, std::uint32_t from 1 on.
bool load_mover(CUfunction* kernel);

}  // namespace ferry::ucx_card

#endif  // FERRY_TESTS_UCX_CARD_GPU_MOVER_RING_HPP
