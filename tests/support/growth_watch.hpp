#ifndef FERRY_TESTS_GROWTH_WATCH_HPP
#define FERRY_TESTS_GROWTH_WATCH_HPP

/// Whether one rank of a group, or its process, holds more and more as calls go on.

#include <cstddef>
#include <optional>
#include <string_view>

#include "ferry/group.hpp"
#include "support/process_usage.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {

class GrowthWatch {
 public:
  /// Ranks that are threads have one process, which one of them measures.
  GrowthWatch(RankContext& context, const Group& group, RankKind kind)
      : context_(context), group_(group), measures_process_(kind == RankKind::kProcesses || context.rank() == 0) {}

  /// Compares what is held after `num_calls` calls with the first measurement. The ranks have neither tensors nor
  /// Routings then, and meet before and after it; false if they did not.
  bool take_stock(int num_calls);

 private:
  struct Holdings {
    ProcessUsage process;
    MemoryUsage group;
  };
  bool meet();
  void expect_no_growth(std::string_view what, std::size_t now, std::size_t warm, std::size_t spare);

  RankContext& context_;
  const Group& group_;
  bool measures_process_;
  int num_calls_ = 0;
  std::optional<Holdings> warm_;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_GROWTH_WATCH_HPP
