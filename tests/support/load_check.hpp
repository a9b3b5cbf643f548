#ifndef FERRY_TESTS_LOAD_CHECK_HPP
#define FERRY_TESTS_LOAD_CHECK_HPP

/// Counters that a call adds to, with their expected values.

#include <array>

#include "support/exchange_case.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {

class CounterTensors {
 public:
  /// The case's seed decides which counters exist, often none, and of which dtype.
  CounterTensors(RankContext& context, Group& group, const PreparedCase& prepared);
  const LoadCounters& views() const { return views_; }
  /// Compares the counters after `num_calls` calls of the case; 0: unchanged.
  void expect_counted(RankContext& context, const std::string& where, int num_calls) const;

 private:
  struct Counter {
    DType dtype = DType::kInt64;
    std::vector<std::int64_t> counts;
    PlainMemory memory;
    TensorView view;
  };

  bool on_device_;
  std::array<Counter, 4> counters_;
  LoadCounters views_;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_LOAD_CHECK_HPP
