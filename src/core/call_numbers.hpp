#ifndef FERRY_CORE_CALL_NUMBERS_HPP
#define FERRY_CORE_CALL_NUMBERS_HPP

/// How many calls a group's ranks have made together. By that number ranks tell whether their Routings are of the same
/// route, so all must count alike: calls that were refused too, and those of different kinds, but not calls on a
/// Routing whose route was refused where ranks that know so make none.

#include <cstdint>
#include <memory>
#include <vector>

#include "core/routing_state.hpp"

namespace ferry {

/// Of one group, whose thread makes all calls.
class CallNumbers {
 public:
  /// One more call.
  void count() { ++num_calls_; }
  /// One more on this Routing, which may be null.
  void count_on(const RoutingState* routing);
  /// The number of the call that was counted last and has made this Routing. What is known of earlier routes by now is
  /// taken into account; until it is, the numbers of ranks may differ.
  std::int64_t number_of_route(const std::shared_ptr<const RoutingState>& made);

 private:
  struct Unsettled {
    std::weak_ptr<const RoutingState> routing;
    std::shared_ptr<UnsettledCalls> calls;
  };

  std::int64_t num_calls_ = 0;
  std::vector<Unsettled> unsettled_;
};

}  // namespace ferry

#endif  // FERRY_CORE_CALL_NUMBERS_HPP
