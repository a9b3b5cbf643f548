#ifndef FERRY_TESTS_LOAD_CHECK_HPP
#define FERRY_TESTS_LOAD_CHECK_HPP

/// Counters that a call adds to, and what they must hold after it.

#include <array>

#include "support/exchange_case.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {

class CounterTensors {
 public:
  /// Which counters there are, and of which type, follows from the case's seed; often none.
  CounterTensors(RankContext& context, Group& group, const PreparedCase& prepared);
  const LoadCounters& views() const { return views_; }
  /// Compares them after `num_calls` calls of the case. None: they are as they were.
  void expect_counted(RankContext& context, const std::string& where, int num_calls) const;

 private:
  struct Counter {
    DType dtype = DType::kInt64;
    std::vector<std::int64_t> counts;
    PlainMemory memory;
    TensorView view;
  };

  bool on_device_;
  std::array<Counter, 3> counters_;
  LoadCounters views_;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_LOAD_CHECK_HPP
