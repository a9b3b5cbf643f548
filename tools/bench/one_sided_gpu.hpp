#ifndef FERRY_TOOLS_BENCH_ONE_SIDED_GPU_HPP
#define FERRY_TOOLS_BENCH_ONE_SIDED_GPU_HPP

/// Measurements of one-sided calls that the kernels of two ranks make.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "bench/one_sided.hpp"
#include "bench/one_sided_kernels.hpp"
#include "device/device_memory.hpp"
#include "ferry/one_sided.hpp"

namespace ferry::tools {

/// Number of kernels of a series.
struct KernelCounts {
  int num_warmup = 0;
  int num_iterations = 0;
};

class GpuSeries {
 public:
  /// `max_bytes`: size of the largest copy. The stream belongs to the rank. Collective.
  /// @throws Error
  GpuSeries(const OneSidedRun& run, OneSided& shm, Stream stream, std::size_t max_bytes);

  /// Nanoseconds per call in a kernel that makes `num_calls` calls one after the other; half of a round trip.
  /// Collective over the first and the last rank. Empty on a rank that only answers.
  /// @throws Error
  std::vector<std::int64_t> exchanges(std::size_t num_bytes, int num_calls, bool raw, const KernelCounts& kernels);
  /// Nanoseconds of a kernel with `num_calls` calls in flight at once, and quiet.
  std::vector<std::int64_t> windows(std::size_t num_bytes, int num_calls, bool raw, const KernelCounts& kernels);
  /// True if this rank's GPU reaches the other rank's memory.
  bool has_raw() const { return raw_block_ != nullptr; }

 private:
  OneSidedKernelParams params(std::size_t num_bytes, int num_calls, bool raw) const;
  std::vector<std::int64_t> series(bool acts, const KernelCounts& kernels, const std::function<Status()>& launch);

  const OneSidedRun& run_;
  OneSided& shm_;
  Stream stream_;
  bool is_first_;
  int other_;
  // Created before the objects that all ranks create together: if ranks share a GPU, CUDA may wait until it is idle,
  // which it is not while a rank's kernel waits for another rank.
  DeviceMemory local_;
  DeviceMemory failed_;
  DeviceEvent start_;
  DeviceEvent end_;
  device::World world_;
  std::byte* block_;
  std::uint64_t* words_;
  std::byte* raw_block_;  // of the other rank; null on another node
  std::uint64_t* raw_words_;
  std::uint64_t turn_ = 0;
};

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_ONE_SIDED_GPU_HPP
