#ifndef FERRY_TESTS_EMULATOR_LATENCY_RANKS_HPP
#define FERRY_TESTS_EMULATOR_LATENCY_RANKS_HPP

/// Ranks that make calls of latency mode on emulated GPUs: the parameters that the library's host side gives to
/// kernels.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/intranode/wait_times.hpp"
#include "cuda/latency/mask.hpp"
#include "emulator/emulator.hpp"
#include "oracle/oracle.hpp"

namespace ferry::emulator {

/// Memory with the alignment of GPU memory and a guard after it. Filled with a pattern.
class DeviceMemory {
 public:
  static constexpr std::size_t kAlignment = 4096;
  static constexpr std::byte kPattern{0xEE};

  DeviceMemory() = default;
  explicit DeviceMemory(std::size_t bytes, std::byte fill = kPattern);
  std::byte* data() const { return data_; }
  std::size_t size() const { return bytes_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  /// Whether the guard is unchanged.
  bool is_guarded() const;

 private:
  std::vector<std::byte> memory_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Arenas, reports and a stream for each rank.
class LatencyRanks {
 public:
  struct Options {
    int num_ranks = 1;
    std::int64_t latency_bytes = 0;
    std::uint64_t seed = 1;
    std::uint64_t calls_before = 0;     ///< number of calls of either kind before the first
    std::uint64_t words_ahead = 0;      ///< words of sets hold the values that calls this much later wrote 2^32 calls
                                        ///< ago
    std::uint64_t mask_timeout_ns = 0;  ///< if not 0, lost ranks are masked
    bool counts_waits = false;          ///< programs request wait times
  };
  static constexpr std::uint64_t kTimeoutNs = 30'000'000'000;

  explicit LatencyRanks(const Options& options);

  int num_ranks() const { return options_.num_ranks; }
  Machine& machine() { return machine_; }
  cudaStream_t stream(int rank) const { return streams_[static_cast<std::size_t>(rank)]; }
  const cuda::LatencyLayout& layout() const { return layout_; }
  cuda::RankParams params(int rank);
  const DeviceMemory& arena(int rank) const { return arenas_[static_cast<std::size_t>(rank)]; }
  bool counts_waits() const { return options_.counts_waits; }
  /// Adds the wait times of `launch` to the rank's sums for the other ranks.
  template <typename Launch>
  void time(int rank, Launch launch) {
    cuda::launch_timed(wait_times_params(rank), stream(rank), [&launch] {
      launch();
      return cudaSuccess;
    });
  }
  std::int64_t wait_time_ns(int rank, int other) const {
    return wait_times_[static_cast<std::size_t>(rank)][static_cast<std::size_t>(other)];
  }
  bool masks() const { return options_.mask_timeout_ns != 0; }
  cuda::MaskParams mask(int rank) const;
  /// Queue on the rank's stream: mask or unmask other ranks; write the mask to `out` [R].
  void update_mask(int rank, const std::vector<int>& others, bool masked);
  void query_mask(int rank, std::int32_t* out);
  /// Queues on the rank's stream a delay by the machine's clock, which advances while nothing else makes progress.
  void delay(int rank, std::uint64_t time_ns);
  /// Queues a refusal.
  void refuse(const cuda::LatencyRefusalParams& params);
  /// Emulates that `source` has sent `rank` only this header, for call `number` in `set`.
  void put_header(int rank, cuda::LatencyKind kind, int source, std::uint64_t number, int set,
                  const cuda::LatencyHeader& header);
  cuda::DeviceReport& report(int rank) { return reports_[static_cast<std::size_t>(rank)]; }
  /// Number of calls that the rank has sent.
  std::uint64_t num_sent(int rank, cuda::LatencyKind kind);

 private:
  cuda::WaitTimesParams wait_times_params(int rank);
  void age_words(int rank);
  void grant_first_sets(int rank);

  Options options_;
  Machine machine_;
  cuda::LatencyLayout layout_;
  std::vector<cudaStream_t> streams_;
  std::vector<DeviceMemory> arenas_;
  std::vector<DeviceMemory> masks_;
  std::vector<cuda::DeviceReport> reports_;
  std::vector<std::vector<std::int64_t>> wait_times_;
};

}  // namespace ferry::emulator

#endif  // FERRY_TESTS_EMULATOR_LATENCY_RANKS_HPP
