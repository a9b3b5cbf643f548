#ifndef FERRY_TOOLS_BENCH_COPY_LIMIT_HPP
#define FERRY_TOOLS_BENCH_COPY_LIMIT_HPP

/// Best case of the machine: all ranks at once move as many bytes as the operation does, by plain `memcpy` of whole
/// rows between the same buffers, without regard to their destinations.

#include <vector>

#include "bench/bench_buffers.hpp"
#include "bench/bench_plan.hpp"

namespace ferry::tools {

/// Dispatch reads each token once and writes it once per destination; this does the same, one row after another.
void copy_as_dispatch(const BenchPlan& plan, const BenchBuffers& buffers, const std::vector<int>& rows_per_token);

/// Combine reads `num_sent_rows` rows and writes T; this reads and writes half of the total each.
void copy_as_combine(const BenchPlan& plan, const BenchBuffers& buffers, std::int64_t num_sent_rows);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_COPY_LIMIT_HPP
