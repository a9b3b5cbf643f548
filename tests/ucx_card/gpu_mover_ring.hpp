#ifndef FERRY_TESTS_UCX_CARD_GPU_MOVER_RING_HPP
#define FERRY_TESTS_UCX_CARD_GPU_MOVER_RING_HPP

/// Memory by which the host and the kernel of a mover (gpu_mover.hpp) speak. There are two kinds of commands: large
/// copies, which all blocks but one share, and small ones and words, for one block that reads them itself: the express
/// block. Each kind has numbers from 1 on.

#include <cuda.h>

#include <cstddef>
#include <cstdint>

namespace ferry::ucx_card {

inline constexpr unsigned kMoverBlocks = 8;         ///< that share large copies; the express block follows
inline constexpr unsigned kMoverThreads = 18 * 32;  ///< of a block
inline constexpr std::size_t kMoverCommands = 256;  ///< of a kind, under way at most
inline constexpr std::uint64_t kMoverSmall =
    32768;  ///< bytes of the largest copy of the express block, one of its steps
/// In place of the number of a large copy in a command of the express block: the command is a copy.
inline constexpr std::uint64_t kMoverCopy = ~std::uint64_t{0};

/// Each word has half a number and, in its upper half, the number of the command, so that a reader knows which words
/// are there. Halves, the lower one first, of a large copy: `to`, `from`, `num_bytes` and the lower half of the GPU's
/// time until which it waits (0: it does not), and two of 0. Of a small one the same with kMoverCopy. Of a word: `to`,
/// the word, the GPU's time until which it waits, and the large copy that it waits for.
struct alignas(64) MoverCommand {
  std::uint64_t words[8];
};

/// Commands of a kind, that of number n at n modulo their count.
struct MoverCommands {
  MoverCommand commands[kMoverCommands];
};

/// In memory of the host, which the GPU reads and writes.
struct MoverRing {
  MoverCommands large;
  MoverCommands express;
  alignas(128) std::uint64_t is_done[kMoverBlocks];  ///< each block: all large copies up to this are done
  alignas(128) std::uint64_t express_done;
  alignas(128) std::uint64_t next;  ///< as it ends: the first command that it has not taken
  std::uint64_t express_next;
  std::uint64_t ended;                ///< the last launch that takes no more
  alignas(128) std::uint64_t gpu_ns;  ///< the GPU's time, again and again; 0: not yet
};

/// Memory of the GPU, zero before the first launch.
struct MoverState {
  MoverCommands passed;  ///< large copies, as the first block passes them on
  std::uint64_t done[kMoverBlocks];
  std::uint64_t active_ns;  ///< the GPU's time when the express block had its last command
  std::uint64_t closing;    ///< last launch whose express block is to take no more
  std::uint64_t closed;     ///< and has taken none since
};

struct MoverLaunch {
  MoverRing* ring;
  MoverState* state;
  std::uint64_t first;          ///< large copy
  std::uint64_t express_first;  ///< command of the express block
  std::uint32_t number;         ///< of the launch, from 1 on
};

/// The kernel for the current context, loaded. Its argument: MoverLaunch.
bool load_mover(CUfunction* kernel);

}  // namespace ferry::ucx_card

#endif  // FERRY_TESTS_UCX_CARD_GPU_MOVER_RING_HPP
