#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <random>
#include <thread>

#include "conformance/node_shape.hpp"
#include "support/exchange_check.hpp"
#include "support/growth_watch.hpp"
#include "support/sanitizers.hpp"

/// Thousands of calls on one group of several nodes, with ranks that arrive late: every result equals the oracle's, and
/// the group holds no more memory at the end than after warming up.

namespace ferry::test {
namespace {

constexpr int kNumCalls = kSanitized ? 3000 : 10000;
/// Later measurements are compared with the first.
constexpr int kCallsBetweenSamples = kSanitized ? 1000 : 2000;
/// Odd, as route's tables alternate between two blocks: when the group is warm, each case has used both blocks.
constexpr int kNumCases = 41;
constexpr std::size_t kNumKept = 4;
/// One call in this many is delayed on a rank, by less than kLongestStallUs microseconds.
constexpr std::uint64_t kCallsPerStall = 50;
constexpr std::uint64_t kLongestStallUs = 3000;

class Soak {
 public:
  Soak(RankContext& context, Group& group, const std::vector<PreparedCase>& cases, RankKind kind)
      : context_(context),
        group_(group),
        cases_(cases),
        growth_(context, group, kind),
        stalls_(1000 + static_cast<std::uint64_t>(context.rank())) {}

  void run() {
    for (int pass = 0; pass < 2; ++pass) {
      for (const PreparedCase& one : cases_) {
        if (!all_calls_of(one)) return;
      }
    }
    const int warm = call_ / kCallsBetweenSamples + 1;
    for (int sample = warm; sample * kCallsBetweenSamples <= kNumCalls; ++sample) {
      while (call_ < sample * kCallsBetweenSamples) {
        if (!next_call()) return;
      }
      if (!take_stock()) return;
    }
  }

 private:
  struct Kept {
    Routing routing;
    const PreparedCase* of = nullptr;
  };

  bool all_calls_of(const PreparedCase& one) {
    Kept kept;
    if (!route(&kept, one)) return false;
    for (std::size_t i = 0; i < one.dispatches.size(); ++i) {
      if (!dispatch(kept, i)) return false;
    }
    for (std::size_t i = 0; i < one.combines.size(); ++i) {
      if (!combine(kept, i)) return false;
    }
    return true;
  }

  /// Draws the next call, the same on all ranks. A Routing is reused many times, interleaved with other routes.
  bool next_call() {
    Kept& kept = kept_[plan_() % kept_.size()];
    const std::uint64_t drawn = plan_();
    if (!kept.routing.present() || drawn % 5 == 0) return route(&kept, cases_[plan_() % cases_.size()]);
    if (drawn % 5 <= 2) return dispatch(kept, plan_() % kept.of->dispatches.size());
    return combine(kept, plan_() % kept.of->combines.size());
  }

  bool route(Kept* kept, const PreparedCase& one) {
    stall();
    *kept = {check_route(context_, group_, one), &one};
    return note_call();
  }
  bool dispatch(const Kept& kept, std::size_t dispatch_idx) {
    stall();
    check_dispatch(context_, group_, kept.routing, *kept.of, dispatch_idx);
    return note_call();
  }
  bool combine(const Kept& kept, std::size_t combine_idx) {
    stall();
    check_combine(context_, group_, kept.routing, *kept.of, combine_idx);
    return note_call();
  }

  /// The length of the stall affects only which rank waits for which.
  void stall() {
    if (stalls_() % kCallsPerStall != 0) return;
    std::this_thread::sleep_for(std::chrono::microseconds(stalls_() % kLongestStallUs));
  }

  bool note_call() {
    ++call_;
    if (context_.failures().size() == num_growths_) return true;
    context_.fail(fmt::format("this was call {}", call_));
    return false;
  }

  bool take_stock() {
    kept_ = {};
    const bool met = growth_.take_stock(call_);
    // Growth is reported once; the calls continue, so that the other ranks report nothing.
    num_growths_ = context_.failures().size();
    return met;
  }

  RankContext& context_;
  Group& group_;
  const std::vector<PreparedCase>& cases_;
  GrowthWatch growth_;
  std::mt19937_64 plan_{5};  // the same on every rank
  std::mt19937_64 stalls_;
  int call_ = 0;
  std::size_t num_growths_ = 0;
  std::array<Kept, kNumKept> kept_;
};

class NodesSoak : public testing::TestWithParam<NodeShape> {};

TEST_P(NodesSoak, NothingIsWrongAndNothingGrows) {
  std::mt19937_64 random(99);
  std::vector<PreparedCase> cases;
  for (int i = 0; i < kNumCases; ++i)
    cases.push_back(prepare_on(GetParam(), draw_case(random, GetParam().num_ranks())));
  run_on_nodes(GetParam(),
               [&](RankContext& context, Group& group) { Soak(context, group, cases, GetParam().kind()).run(); });
}

INSTANTIATE_TEST_SUITE_P(Shapes, NodesSoak, testing::Values(NodeShape{2, 2, "loopback"}, NodeShape{2, 2, "ucx"}),
                         shape_name);

}  // namespace
}  // namespace ferry::test
