#ifndef FERRY_TOOLS_BENCH_RAW_LIMIT_HPP
#define FERRY_TOOLS_BENCH_RAW_LIMIT_HPP

/// What the links between the GPUs reach at best, in the same run and with rows of the same size as the operation.

#include "bench/bench_plan.hpp"
#include "bench/device_report.hpp"
#include "bench/gpu_timer.hpp"
#include "device/rank_device.hpp"
#include "run/launcher.hpp"

namespace ferry::tools {

struct RawLimitInput {
  BenchOp op = BenchOp::kDispatch;
  std::int64_t row_bytes = 0;             ///< of a record as the operation moves it: what counts
  std::int64_t num_sent_rows = 0;         ///< of this rank, own included
  std::int64_t num_sent_remote_rows = 0;  ///< of this rank
  int call_num_sms = 0;                   ///< what the operation was given, 0 for its default
  bool with_flags = false;                ///< also measure a flag's round trip, once in a report
};

/// Every rank exchanges as many rows as ranks send on average to others, evenly over all of these (where all ranks
/// share one GPU: as many as they send at all, evenly over all ranks). Rows are whole lines apart, so that nothing that
/// the operation could do better slows the limit down. Appends to `report`. Collective.
Status measure_raw_limit(const RawLimitInput& input, RankContext& context, const RankDevice& device,
                         const GpuTimer& timer, DeviceReport* report);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_RAW_LIMIT_HPP
