#ifndef FERRY_TOOLS_BENCH_ONE_SIDED_KERNELS_HPP
#define FERRY_TOOLS_BENCH_ONE_SIDED_KERNELS_HPP

/// Kernels that repeat one-sided calls, and equivalent plain loads, stores and atomics through the peer's pointer.

#include <cstdint>

#include "bench/bench_plan.hpp"
#include "ferry/device/world.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry::tools {

struct OneSidedKernelParams {
  device::World world;
  BenchOp op = BenchOp::kPut;
  bool raw = false;
  bool is_first = false;
  int other = 0;
  std::byte* block = nullptr;      ///< symmetric; the other rank's copy is accessed
  std::byte* raw_block = nullptr;  ///< the same block through the other rank's pointer
  std::byte* local = nullptr;      ///< memory of this rank
  std::uint64_t* word = nullptr;   ///< symmetric
  std::uint64_t* raw_word = nullptr;
  std::uint64_t num_bytes = 0;
  std::uint64_t turn = 0;  ///< turns of earlier rounds
  int num_calls = 0;
  std::uint64_t* failed = nullptr;  ///< in this rank's GPU memory: number of failed calls
};

/// Makes `num_calls` calls in one block, one after the other; put and signal make a round trip.
Status launch_exchanges(const OneSidedKernelParams& params, Stream stream);
/// Keeps `num_calls` calls in flight at once, spread over blocks (copies) or threads (words), and calls quiet.
Status launch_window(const OneSidedKernelParams& params, Stream stream);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_ONE_SIDED_KERNELS_HPP
