#ifndef FERRY_TOOLS_BENCH_FP8_SUMS_HPP
#define FERRY_TOOLS_BENCH_FP8_SUMS_HPP

#include <cstdint>
#include <span>
#include <vector>

#include "bench/bench_plan.hpp"
#include "ferry/status.hpp"

namespace ferry::tools {

/// Sums of a combine whose rows, in latency mode whose ranks' sums, travel as FP8. One object serves one token after
/// another and keeps its memory.
class Fp8Sums {
 public:
  explicit Fp8Sums(const BenchPlan& plan);

  /// Sums [H], before the last rounding, of a token x [H] of bf16 whose rows all return unchanged. `weights`: of its
  /// rows on each rank, in the order in which they are added. Valid until the next call.
  Result<std::span<const float>> of(const std::uint16_t* x, const std::vector<std::vector<float>>& weights);

 private:
  /// Replaces values_ by what they are after they have travelled.
  Status travel();
  Status sum_rows(const std::vector<std::vector<float>>& weights);
  Status sum_ranks(const std::vector<std::vector<float>>& weights);

  const BenchPlan& plan_;
  std::vector<float> x_;
  std::vector<float> values_;
  std::vector<float> node_sums_;
  std::vector<float> sums_;
  std::vector<std::uint8_t> codes_;
  std::vector<float> scales_;
};

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_FP8_SUMS_HPP
