#ifndef FERRY_CORE_LATENCY_CALLS_HPP
#define FERRY_CORE_LATENCY_CALLS_HPP

/// Split calls of a group that are sent and not received: at most kMaxLatencyCallsInFlight of each kind, in memory that
/// no other call of the kind uses. A Routing that the program has dropped can never be received: its call counts until
/// the backend drops the Routing too.

#include <memory>
#include <vector>

#include "core/backend.hpp"
#include "core/overlap.hpp"

namespace ferry {

class LatencyCalls {
 public:
  /// Whether a dispatch may be sent now.
  /// @errors kInvalidArgument: too many are in flight (split calls only), or one in flight writes to the same memory
  Status check_dispatch(const LatencyDispatchCall& call);
  /// Whether a combine may be sent now on this Routing.
  /// @errors kInvalidArgument: too many are in flight (split calls only), or the Routing is not ready for it
  Status check_combine(const RoutingState& routing, bool split);
  /// Whether a call on this Routing is waiting to be received.
  /// @errors kInvalidArgument
  static Status check_receive(const RoutingState& routing);

  /// Records a call that was sent, and succeeded so far.
  void sent(const LatencyDispatchCall& call, const std::shared_ptr<RoutingState>& routing);
  void sent(const LatencyCombineCall& call);
  /// Records the result of a receive half.
  void received(const std::shared_ptr<const RoutingState>& routing, const Status& status);

 private:
  struct Dispatch {
    std::weak_ptr<const RoutingState> routing;
    Rows x;
    TensorView scales;
  };
  // Calls in flight, and Routings that were dropped since the last check.
  std::vector<Dispatch> dispatches_;
  std::vector<std::weak_ptr<const RoutingState>> combines_;
};

/// Whether a call of route's kind may use this Routing: a Routing of latency mode must have been received.
/// @errors kInvalidArgument
Status check_received(std::string_view operation, const RoutingState& routing);

}  // namespace ferry

#endif  // FERRY_CORE_LATENCY_CALLS_HPP
