/// Calls that a group allows on a Routing of latency mode, phase by phase.

#include "core/latency_calls.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <string>

namespace ferry {
namespace {

/// Routing of a backend whose receive half returns before the dispatch's outcome is known.
struct LateRouting : RoutingState {
  bool dispatch_failed() const override { return failed; }
  bool failed = false;
};

LatencyDispatchCall split_dispatch() {
  LatencyDispatchCall call;
  call.split = true;
  return call;
}

std::string text_of(const Status& status) { return status.to_string(); }

TEST(LatencyCalls, ADispatchThatIsFoundToHaveFailedAfterItWasReceivedIsOfNoUse) {
  LatencyCalls calls;
  const auto routing = std::make_shared<LateRouting>();
  calls.sent(split_dispatch(), routing);
  EXPECT_TRUE(LatencyCalls::check_receive(*routing).ok());
  calls.received(routing, {});
  EXPECT_TRUE(calls.check_combine(*routing, false).ok());
  EXPECT_TRUE(check_received("channel_tables", *routing).ok());
  EXPECT_NE(text_of(LatencyCalls::check_receive(*routing)).find("nothing is to be received"), std::string::npos);
  routing->failed = true;
  const std::string failed = ": the Routing's dispatch failed when it was received; call latency_dispatch again";
  EXPECT_EQ(text_of(LatencyCalls::check_receive(*routing)), "kInvalidArgument: latency_receive" + failed);
  EXPECT_EQ(text_of(calls.check_combine(*routing, true)), "kInvalidArgument: latency_combine" + failed);
  EXPECT_EQ(text_of(check_received("channel_tables", *routing)), "kInvalidArgument: channel_tables" + failed);
}

/// A call in flight can be received, whether or not its outcome is known.
TEST(LatencyCalls, ACombineOfAFailedDispatchIsReceivedAllTheSame) {
  LatencyCalls calls;
  const auto routing = std::make_shared<LateRouting>();
  calls.sent(split_dispatch(), routing);
  calls.received(routing, {});
  LatencyCombineCall combine;
  combine.combine.routing = routing;
  combine.split = true;
  calls.sent(combine);
  routing->failed = true;
  EXPECT_TRUE(LatencyCalls::check_receive(*routing).ok());
  calls.received(routing, {});
  EXPECT_FALSE(calls.check_combine(*routing, false).ok());
}

}  // namespace
}  // namespace ferry
