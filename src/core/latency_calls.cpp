#include "core/latency_calls.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace ferry {
namespace {

Status invalid(std::string message) { return Status(ErrorCode::kInvalidArgument, std::move(message)); }

Status too_many_in_flight(std::string_view operation) {
  return invalid(
      fmt::format("{}: {} split calls are sent and not received, expected fewer than {}; call "
                  "latency_receive on their Routings first",
                  operation, kMaxLatencyCallsInFlight, kMaxLatencyCallsInFlight));
}

/// Phase of the Routing, updated by its backend's findings.
LatencyPhase phase_of(const RoutingState& routing) {
  if (routing.latency_phase == LatencyPhase::kReady && routing.dispatch_failed()) return LatencyPhase::kDispatchFailed;
  return routing.latency_phase;
}

}  // namespace

Status LatencyCalls::check_dispatch(const LatencyDispatchCall& call) {
  std::erase_if(dispatches_, [](const Dispatch& dispatch) { return dispatch.routing.expired(); });
  if (call.split && dispatches_.size() == kMaxLatencyCallsInFlight) return too_many_in_flight("latency_dispatch");
  const std::array mine{Footprint("output x", call.dispatch.out_x),
                        Footprint("output scales", call.dispatch.out_scales)};
  for (const Dispatch& other : dispatches_) {
    const std::array theirs{Footprint("output x of a dispatch that is not received", other.x),
                            Footprint("output scales of a dispatch that is not received", other.scales)};
    if (Status status = check_overlap("latency_dispatch", mine, theirs); !status.ok()) return status;
  }
  return {};
}

Status LatencyCalls::check_combine(const RoutingState& routing, bool split) {
  switch (phase_of(routing)) {
    case LatencyPhase::kNone:
      return invalid(
          "latency_combine: the Routing was not made by latency_dispatch, expected one that was; call combine on it");
    case LatencyPhase::kDispatchSent:
    case LatencyPhase::kDispatchFailed:
      return check_received("latency_combine", routing);
    case LatencyPhase::kCombineSent:
      return invalid(
          "latency_combine: a combine on this Routing is sent and not received; call latency_receive on it first");
    case LatencyPhase::kReady:
      break;
  }
  std::erase_if(combines_, [](const auto& combine) { return combine.expired(); });
  if (split && combines_.size() == kMaxLatencyCallsInFlight) return too_many_in_flight("latency_combine");
  return {};
}

Status LatencyCalls::check_receive(const RoutingState& routing) {
  switch (phase_of(routing)) {
    case LatencyPhase::kDispatchSent:
    case LatencyPhase::kCombineSent:
      return {};
    case LatencyPhase::kNone:
      return invalid("latency_receive: the Routing was not made by latency_dispatch; only split calls are received");
    case LatencyPhase::kReady:
      return invalid(
          "latency_receive: nothing is to be received on this Routing; set `split` in the call that sends, and receive "
          "once");
    case LatencyPhase::kDispatchFailed:
      return check_received("latency_receive", routing);
  }
  return {};
}

void LatencyCalls::sent(const LatencyDispatchCall& call, const std::shared_ptr<RoutingState>& routing) {
  routing->latency_phase = call.split ? LatencyPhase::kDispatchSent : LatencyPhase::kReady;
  if (call.split) dispatches_.push_back({routing, call.dispatch.out_x, call.dispatch.out_scales});
}

void LatencyCalls::sent(const LatencyCombineCall& call) {
  if (!call.split) return;
  call.combine.routing->latency_phase = LatencyPhase::kCombineSent;
  combines_.push_back(call.combine.routing);
}

void LatencyCalls::received(const std::shared_ptr<const RoutingState>& routing, const Status& status) {
  if (routing->latency_phase == LatencyPhase::kCombineSent) {
    std::erase_if(combines_, [&routing](const auto& combine) { return combine.lock() == routing; });
    routing->latency_phase = LatencyPhase::kReady;
    return;
  }
  std::erase_if(dispatches_, [&routing](const Dispatch& dispatch) { return dispatch.routing.lock() == routing; });
  routing->latency_phase = status.ok() ? LatencyPhase::kReady : LatencyPhase::kDispatchFailed;
}

Status check_received(std::string_view operation, const RoutingState& routing) {
  switch (phase_of(routing)) {
    case LatencyPhase::kDispatchSent:
      return invalid(fmt::format(
          "{}: the Routing's dispatch is sent and not received; call latency_receive on it first", operation));
    case LatencyPhase::kDispatchFailed:
      return invalid(fmt::format("{}: the Routing's dispatch failed when it was received; call latency_dispatch again",
                                 operation));
    case LatencyPhase::kNone:
    case LatencyPhase::kReady:
    case LatencyPhase::kCombineSent:
      return {};
  }
  return {};
}

}  // namespace ferry
