/// Numbers by which ranks detect whether their Routings belong to the same route.

#include "core/call_numbers.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <utility>

namespace ferry {
namespace {

using enum RouteOutcome;

/// Routing of a route whose outcome the host learns late.
std::shared_ptr<RoutingState> late_routing(const RouteOutcome& outcome) {
  auto routing = std::make_shared<RoutingState>();
  routing->unsettled = std::make_shared<UnsettledCalls>();
  routing->unsettled->look = [&outcome] { return outcome; };
  return routing;
}

std::int64_t number_of_next(CallNumbers& numbers) {
  numbers.count();
  return numbers.number_of_route({});
}

TEST(CallNumbers, CallsOnARouteCountWhetherItTookPlaceOrAllLearnLateThatItDidNot) {
  for (const bool late : {false, true}) {
    CallNumbers numbers(false);
    const RouteOutcome outcome = kAllMakeCalls;
    const auto routing = late ? late_routing(outcome) : std::make_shared<RoutingState>();
    numbers.count();
    EXPECT_EQ(numbers.number_of_route(*routing), 0);
    numbers.count_on(routing.get());
    numbers.count_on(nullptr);
    EXPECT_EQ(number_of_next(numbers), 3);
    numbers.count_on(routing.get());
    EXPECT_EQ(number_of_next(numbers), 5);
  }
}

TEST(CallNumbers, CallsThatSomeRanksDoNotMakeCountUntilThatIsKnown) {
  CallNumbers numbers(false);
  RouteOutcome outcome = kUnknown;
  const auto routing = late_routing(outcome);
  numbers.count();
  EXPECT_EQ(numbers.number_of_route(*routing), 0);
  numbers.count_on(routing.get());
  numbers.count_on(routing.get());
  EXPECT_EQ(number_of_next(numbers), 3);
  outcome = kSomeMakeCalls;
  numbers.count_on(routing.get());        // the dropped route no longer counts its calls
  EXPECT_EQ(number_of_next(numbers), 2);  // the two routes alone
  numbers.count_on(routing.get());
  EXPECT_EQ(number_of_next(numbers), 3);
}

/// A process that takes a lost rank's place captures calls that the others captured before.
TEST(CallNumbers, CallsThatAreCapturedBelongToTheirDispatchAndToNoRoute) {
  CallNumbers early(true);
  CallNumbers late(true);
  for (CallNumbers* const numbers : {&early, &late, &late, &late}) {
    RoutingState routing;
    numbers->count_latency();
    numbers->number_dispatch(routing);
    EXPECT_LT(routing.call_number, 0);
    numbers->count_latency();
    EXPECT_EQ(numbers->number_of_combine(routing), 1);
    numbers->count_latency();
    EXPECT_EQ(numbers->number_of_combine(routing), 2);
  }
  EXPECT_EQ(number_of_next(early), number_of_next(late));
}

TEST(CallNumbers, OtherwiseCallsOfLatencyModeCountAsAllOthers) {
  CallNumbers numbers(false);
  RoutingState routing;
  numbers.count();
  numbers.count_latency();
  numbers.number_dispatch(routing);
  EXPECT_EQ(routing.call_number, 1);
  numbers.count_latency();
  EXPECT_EQ(numbers.number_of_combine(routing), 1);
  EXPECT_EQ(number_of_next(numbers), 3);
}

TEST(CallNumbers, WhatBecameOfDroppedRoutingsIsTakenIntoAccount) {
  CallNumbers numbers(false);
  RouteOutcome outcome = kUnknown;
  for (const std::int64_t number : {0, 2}) {
    const auto routing = late_routing(outcome);
    numbers.count();
    EXPECT_EQ(numbers.number_of_route(*routing), number);
    numbers.count_on(routing.get());
  }
  outcome = kSomeMakeCalls;
  EXPECT_EQ(number_of_next(numbers), 2);  // the two routes alone
}

TEST(CallNumbers, WhatTellsOfARouteIsKeptUntilItHas) {
  CallNumbers numbers(false);
  RouteOutcome outcome = kUnknown;
  auto block = std::make_shared<int>();
  const std::weak_ptr<int> seen = block;
  const auto routing = late_routing(outcome);
  routing->unsettled->look = [block = std::move(block), &outcome] { return outcome; };
  numbers.count();
  EXPECT_EQ(numbers.number_of_route(*routing), 0);
  numbers.settle();
  EXPECT_FALSE(seen.expired());
  outcome = kAllMakeCalls;
  numbers.settle();
  EXPECT_TRUE(seen.expired());
}

}  // namespace
}  // namespace ferry
