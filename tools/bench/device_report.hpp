#ifndef FERRY_TOOLS_BENCH_DEVICE_REPORT_HPP
#define FERRY_TOOLS_BENCH_DEVICE_REPORT_HPP

/// What a rank of a CUDA group returns in addition to its series: its GPU, the kernels of its calls, and what raw
/// exchanges reached.

#include <array>
#include <cstddef>
#include <cstdint>

#include "bench/bench_plan.hpp"
#include "bench/launch_recorder.hpp"
#include "device/device_facts.hpp"

namespace ferry::tools {

/// Which side of the link does the work.
enum class LimitMethod : std::int32_t {
  kPush = 0,  ///< bulk copies into the peers' memory
  kPull = 1,  ///< 16-byte loads from it
};

inline constexpr std::size_t kLimitIterations = 10;
/// Two operations, two methods, up to five numbers of multiprocessors.
inline constexpr std::size_t kMaxLimitRuns = 20;
/// Dispatch, combine, both, and what those of latency mode are compared with.
inline constexpr std::size_t kMaxRecordedCalls = 4;

/// One raw exchange, repeated.
struct LimitRun {
  BenchOp op = BenchOp::kDispatch;  ///< whose rows it moves
  LimitMethod method = LimitMethod::kPush;
  std::int32_t num_sms = 0;
  std::int64_t num_bytes = 0;  ///< of each rank
  std::array<std::int64_t, kLimitIterations> time_ns{};
};

/// Plain bytes; all zero on a CPU group.
struct DeviceReport {
  DeviceFacts facts;
  bool limit_is_local = false;  ///< all ranks share one GPU: the limit is copies inside it, own rows included
  /// A flag's way to another rank and back; 0: not measured, as where all ranks share one GPU.
  std::int64_t flag_round_trip_ns = 0;
  std::uint32_t num_limit_runs = 0;
  std::array<LimitRun, kMaxLimitRuns> limit_runs{};
  std::uint32_t num_calls = 0;
  std::array<CallLaunches, kMaxRecordedCalls> calls{};
};

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_DEVICE_REPORT_HPP
