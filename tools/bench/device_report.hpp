#ifndef FERRY_TOOLS_BENCH_DEVICE_REPORT_HPP
#define FERRY_TOOLS_BENCH_DEVICE_REPORT_HPP

/// Results of a rank of a CUDA group in addition to its series: its GPU, the kernels of its calls, and the rates of raw
/// exchanges.

#include <array>
#include <cstddef>
#include <cstdint>

#include "bench/bench_plan.hpp"
#include "bench/launch_recorder.hpp"
#include "device/device_facts.hpp"

namespace ferry::tools {

/// Side of the link that does the work.
enum class LimitMethod : std::int32_t {
  kPush = 0,  ///< bulk copies into the peers' memory
  kPull = 1,  ///< 16-byte loads from the peers' memory
};

inline constexpr std::size_t kLimitIterations = 10;
/// Two operations, two methods, up to five numbers of multiprocessors.
inline constexpr std::size_t kMaxLimitRuns = 20;
/// Dispatch, combine, both, and the reference calls of latency mode.
inline constexpr std::size_t kMaxRecordedCalls = 4;

/// A raw exchange and its repetitions.
struct LimitRun {
  BenchOp op = BenchOp::kDispatch;  ///< operation whose rows it moves
  LimitMethod method = LimitMethod::kPush;
  std::int32_t num_sms = 0;
  std::int64_t num_bytes = 0;  ///< per rank
  std::array<std::int64_t, kLimitIterations> time_ns{};
};

/// Plain bytes; all zero on a CPU group.
struct DeviceReport {
  DeviceFacts facts;
  bool limit_is_local = false;  ///< all ranks share one GPU: the limit is copies inside it, own rows included
  /// Round trip of a flag between two ranks; 0: not measured, for example because all ranks share one GPU.
  std::int64_t flag_round_trip_ns = 0;
  std::uint32_t num_limit_runs = 0;
  std::array<LimitRun, kMaxLimitRuns> limit_runs{};
  std::uint32_t num_calls = 0;
  std::array<CallLaunches, kMaxRecordedCalls> calls{};
};

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_DEVICE_REPORT_HPP
