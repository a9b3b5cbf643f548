#ifndef FERRY_TOOLS_BENCH_ONE_SIDED_GPU_HPP
#define FERRY_TOOLS_BENCH_ONE_SIDED_GPU_HPP

/// What a pair of ranks measures of one-sided calls that their kernels make.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "bench/one_sided.hpp"
#include "bench/one_sided_kernels.hpp"
#include "device/device_memory.hpp"
#include "ferry/one_sided.hpp"

namespace ferry::tools {

/// Kernels of a series.
struct KernelCounts {
  int num_warmup = 0;
  int num_iterations = 0;
};

class GpuSeries {
 public:
  /// `max_bytes`: of the largest copy. The stream is the rank's. Collective.
  /// @throws Error
  GpuSeries(const OneSidedRun& run, OneSided& shm, Stream stream, std::size_t max_bytes);

  /// Nanoseconds of one call, in a kernel that makes `num_calls` of them one after the other; half of there and back.
  /// Collective over the first and the last rank. Empty on a rank that only answers.
  /// @throws Error
  std::vector<std::int64_t> exchanges(std::size_t num_bytes, int num_calls, bool raw, const KernelCounts& kernels);
  /// Nanoseconds of a kernel with `num_calls` calls under way at once, and quiet.
  std::vector<std::int64_t> windows(std::size_t num_bytes, int num_calls, bool raw, const KernelCounts& kernels);
  /// Whether this rank's GPU reaches the other's memory.
  bool has_raw() const { return raw_block_ != nullptr; }

 private:
  OneSidedKernelParams params(std::size_t num_bytes, int num_calls, bool raw) const;
  std::vector<std::int64_t> series(bool acts, const KernelCounts& kernels, const std::function<Status()>& launch);

  const OneSidedRun& run_;
  OneSided& shm_;
  Stream stream_;
  bool is_first_;
  int other_;
  // Where ranks share a GPU what is made in CUDA may wait for it to be idle, which it is not once a rank's kernel waits
  // for another rank: this comes before what all ranks make together.
  DeviceMemory local_;
  DeviceMemory failed_;
  DeviceEvent start_;
  DeviceEvent end_;
  device::World world_;
  std::byte* block_;
  std::uint64_t* words_;
  std::byte* raw_block_;  // the other rank's; null on another node
  std::uint64_t* raw_words_;
  std::uint64_t turn_ = 0;
};

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_ONE_SIDED_GPU_HPP
