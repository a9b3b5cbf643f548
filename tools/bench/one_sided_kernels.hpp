#ifndef FERRY_TOOLS_BENCH_ONE_SIDED_KERNELS_HPP
#define FERRY_TOOLS_BENCH_ONE_SIDED_KERNELS_HPP

/// Kernels that make one-sided calls many times over, and the same by plain loads, stores and atomics through the
/// peer's pointer.

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
  std::byte* block = nullptr;      ///< symmetric; that of the other rank is meant
  std::byte* raw_block = nullptr;  ///< the same through its pointer
  std::byte* local = nullptr;      ///< memory of this rank
  std::uint64_t* word = nullptr;   ///< symmetric
  std::uint64_t* raw_word = nullptr;
  std::uint64_t num_bytes = 0;
  std::uint64_t turn = 0;  ///< of the rounds before
  int num_calls = 0;
  std::uint64_t* failed = nullptr;  ///< of this rank's GPU: calls that did not succeed
};

/// `num_calls` calls of one block, one after the other; put and signal go there and back.
Status launch_exchanges(const OneSidedKernelParams& params, Stream stream);
/// `num_calls` calls under way at once, spread over blocks (copies) or threads (words), and quiet.
Status launch_window(const OneSidedKernelParams& params, Stream stream);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_ONE_SIDED_KERNELS_HPP
