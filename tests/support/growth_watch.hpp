#ifndef FERRY_TESTS_GROWTH_WATCH_HPP
#define FERRY_TESTS_GROWTH_WATCH_HPP

/// Detects growth, from call to call, of the resources that a rank of a group or its process holds.

#include <cstddef>
#include <optional>
#include <string_view>

#include "ferry/group.hpp"
#include "support/process_usage.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {

class GrowthWatch {
 public:
  /// Ranks that are threads share one process, which one of them measures.
  GrowthWatch(RankContext& context, const Group& group, RankKind kind)
      : context_(context), group_(group), measures_process_(kind == RankKind::kProcesses || context.rank() == 0) {}

  /// Compares the resources held after `num_calls` calls with the first measurement. Call it when ranks hold neither
  /// tensors nor Routings. Ranks meet before and after it; false if the meeting failed.
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
