/// The numbers by which ranks tell whether their Routings are of the same route.

#include "core/call_numbers.hpp"

#include <gtest/gtest.h>

#include <memory>

namespace ferry {
namespace {

/// Of a route whose outcome the host learns late.
std::shared_ptr<RoutingState> late_routing() {
  auto routing = std::make_shared<RoutingState>();
  routing->unsettled = std::make_shared<UnsettledCalls>();
  return routing;
}

std::int64_t number_of_next(CallNumbers& numbers) {
  numbers.count();
  return numbers.number_of_route(std::make_shared<RoutingState>());
}

TEST(CallNumbers, CallsOnARouteThatTookPlaceCount) {
  for (const bool late : {false, true}) {
    CallNumbers numbers;
    const auto routing = late ? late_routing() : std::make_shared<RoutingState>();
    numbers.count();
    EXPECT_EQ(numbers.number_of_route(routing), 0);
    numbers.count_on(routing.get());
    numbers.count_on(nullptr);
    if (late) routing->unsettled->outcome = RouteOutcome::kRouted;
    EXPECT_EQ(number_of_next(numbers), 3);
    numbers.count_on(routing.get());
    EXPECT_EQ(number_of_next(numbers), 5);
  }
}

TEST(CallNumbers, CallsOnARouteThatWasRefusedCountUntilThatIsKnown) {
  CallNumbers numbers;
  std::shared_ptr<RoutingState> routing = late_routing();
  const auto calls = routing->unsettled;
  numbers.count();
  EXPECT_EQ(numbers.number_of_route(routing), 0);
  numbers.count_on(routing.get());
  numbers.count_on(routing.get());
  EXPECT_EQ(number_of_next(numbers), 3);  // not known yet
  calls->outcome = RouteOutcome::kRefused;
  numbers.count_on(routing.get());        // as if it were not
  EXPECT_EQ(number_of_next(numbers), 2);  // the two routes alone
  numbers.count_on(routing.get());
  EXPECT_EQ(number_of_next(numbers), 3);
}

TEST(CallNumbers, WhatBecameOfADroppedRoutingIsTakenIntoAccount) {
  CallNumbers numbers;
  std::shared_ptr<RoutingState> routing = late_routing();
  const auto calls = routing->unsettled;
  numbers.count();
  EXPECT_EQ(numbers.number_of_route(routing), 0);
  numbers.count_on(routing.get());
  routing.reset();
  EXPECT_EQ(number_of_next(numbers), 2);
  calls->outcome = RouteOutcome::kRefused;
  EXPECT_EQ(number_of_next(numbers), 2);
}

/// Knows the outcome when it is asked.
struct AskedRouting : RoutingState {
  void look_for_outcome() const override { unsettled->outcome = RouteOutcome::kRefused; }
};

TEST(CallNumbers, RoutingsAreAsked) {
  CallNumbers numbers;
  const auto routing = std::make_shared<AskedRouting>();
  routing->unsettled = std::make_shared<UnsettledCalls>();
  numbers.count();
  EXPECT_EQ(numbers.number_of_route(routing), 0);
  numbers.count_on(routing.get());
  EXPECT_EQ(number_of_next(numbers), 1);
}

}  // namespace
}  // namespace ferry
