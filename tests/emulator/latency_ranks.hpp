#ifndef FERRY_TESTS_EMULATOR_LATENCY_RANKS_HPP
#define FERRY_TESTS_EMULATOR_LATENCY_RANKS_HPP

/// Ranks that make calls of latency mode on emulated GPUs: what the host's side of the library gives to the kernels.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/call/wait_times.hpp"
#include "cuda/latency/kernels.hpp"
#include "emulator/emulator.hpp"
#include "oracle/oracle.hpp"

namespace ferry::emulator {

/// Memory aligned as GPU memory is, with a guard behind it. Filled with a pattern.
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
  /// Whether nothing was written behind it.
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
    std::uint64_t calls_before = 0;     ///< number of calls of either kind that were made before the first
    std::uint64_t words_ahead = 0;      ///< words of sets are what calls this much later wrote, 2^32 calls ago
    std::uint64_t mask_timeout_ns = 0;  ///< not 0: ranks that are lost are masked
    bool counts_waits = false;          ///< programs ask what calls wait for
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
  /// Adds to the rank's sums by other rank what `launch` waits for.
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
  /// None where ranks are not masked.
  cuda::MaskParams mask(int rank) const;
  /// Queue, on the rank's stream: mask other ranks, or not any more. `out` [R] becomes who is masked.
  void update_mask(int rank, const std::vector<int>& others, bool masked);
  void query_mask(int rank, std::int32_t* out);
  /// Queues, on the rank's stream, what lasts so long by the machine's clock, which goes on while nothing else moves.
  void delay(int rank, std::uint64_t time_ns);
  /// Queues a refusal.
  void refuse(const cuda::LatencyRefusalParams& params);
  /// As if `source` had sent `rank` this header, and nothing else, of call `number` in `set`.
  void put_header(int rank, cuda::LatencyKind kind, int source, std::uint64_t number, int set,
                  const cuda::LatencyHeader& header);
  cuda::DeviceReport& report(int rank) { return reports_[static_cast<std::size_t>(rank)]; }
  /// Calls that the rank has sent.
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
