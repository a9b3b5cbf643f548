#ifndef FERRY_TOOLS_BENCH_RAW_LIMIT_HPP
#define FERRY_TOOLS_BENCH_RAW_LIMIT_HPP

/// Best rate of the links between the GPUs, measured in the same run with rows of the operation's size.

#include "bench/bench_plan.hpp"
#include "bench/device_report.hpp"
#include "bench/gpu_timer.hpp"
#include "device/rank_device.hpp"
#include "run/launcher.hpp"

namespace ferry::tools {

struct RawLimitInput {
  BenchOp op = BenchOp::kDispatch;
  std::int64_t row_bytes = 0;             ///< size of a record as the operation moves it: the bytes that count
  std::int64_t num_sent_rows = 0;         ///< from this rank, including rows to itself
  std::int64_t num_sent_remote_rows = 0;  ///< from this rank to other ranks
  int call_num_sms = 0;                   ///< the operation's option, 0 for its default
  bool with_flags = false;                ///< also measures a flag's round trip, once per report
};

/// Every rank exchanges the average number of rows that a rank sends to others, evenly over all other ranks (if all
/// ranks share one GPU: the average number of all rows, evenly over all ranks). Rows are whole lines apart, so that the
/// limit is not slowed down by an avoidable cost. Appends to `report`. Collective.
Status measure_raw_limit(const RawLimitInput& input, RankContext& context, const RankDevice& device,
                         const GpuTimer& timer, DeviceReport* report);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_RAW_LIMIT_HPP
