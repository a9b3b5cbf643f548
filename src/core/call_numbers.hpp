#ifndef FERRY_CORE_CALL_NUMBERS_HPP
#define FERRY_CORE_CALL_NUMBERS_HPP

/// How many calls a group's ranks have made together. By that number ranks tell whether their Routings are of the same
/// route, so all must count alike: calls that were refused too, and those of different kinds. Calls on a Routing whose
/// route was refused count as well, unless some ranks have known so at once, which then make none: those of the others
/// are subtracted as soon as they know.

#include <cstdint>
#include <deque>
#include <memory>

#include "core/routing_state.hpp"

namespace ferry {

/// Of one group, whose thread makes all calls.
class CallNumbers {
 public:
  /// One more call.
  void count() { ++num_calls_; }
  /// One more on this Routing, which may be null.
  void count_on(const RoutingState* routing);
  /// Takes into account what is known of earlier routes by now, and lets go of what told so: routes need that memory.
  void settle();
  /// The number of the call that was counted last and has made this Routing, settled. Until all is known, the numbers
  /// of ranks may differ.
  std::int64_t number_of_route(const RoutingState& made);

 private:
  std::int64_t num_calls_ = 0;
  std::deque<std::shared_ptr<UnsettledCalls>> unsettled_;  // in the order of their routes, which run one by one
};

}  // namespace ferry

#endif  // FERRY_CORE_CALL_NUMBERS_HPP
