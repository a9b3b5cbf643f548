#ifndef FERRY_TOOLS_BENCH_LAUNCH_RECORDER_HPP
#define FERRY_TOOLS_BENCH_LAUNCH_RECORDER_HPP

/// Recording of the kernels that a call of a CUDA group launches.

#include <array>
#include <cstddef>
#include <cstdint>

#include "bench/bench_plan.hpp"
#include "ferry/launches.hpp"

namespace ferry::tools {

inline constexpr std::size_t kMaxLaunches = 32;

/// Kernels of one call on one rank. Plain bytes.
struct CallLaunches {
  BenchOp op = BenchOp::kRoute;
  std::uint32_t num_launches = 0;  ///< launches beyond kMaxLaunches are only counted
  std::array<KernelLaunch, kMaxLaunches> launches{};
};

/// While one lives, launches of this thread are added to a record. Per thread, because ranks may be threads of a
/// process.
class LaunchRecorder {
 public:
  explicit LaunchRecorder(CallLaunches* record);
  ~LaunchRecorder();
  LaunchRecorder(const LaunchRecorder&) = delete;
  LaunchRecorder& operator=(const LaunchRecorder&) = delete;
};

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_LAUNCH_RECORDER_HPP
