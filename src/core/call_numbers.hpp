#ifndef FERRY_CORE_CALL_NUMBERS_HPP
#define FERRY_CORE_CALL_NUMBERS_HPP

/// Number of calls that a group's ranks have made together. Ranks compare it to check that their Routings are of the
/// same route, so all must count alike: refused calls too, and calls of different kinds. Calls on a Routing whose route
/// was refused count as well, unless some ranks learned of the refusal at once and make no such calls: then the calls
/// of the other ranks are subtracted as soon as these learn of it.

#include <cstdint>
#include <deque>
#include <memory>

#include "core/routing_state.hpp"

namespace ferry {

/// Numbers of one group, whose calls run one at a time.
class CallNumbers {
 public:
  /// Counts a call.
  void count() { ++num_calls_; }
  /// Counts a call on this Routing, which may be null.
  void count_on(const RoutingState* routing);
  /// Applies the known outcomes of earlier routes, and releases the memory that reported them: routes need it.
  void settle();
  /// Number of the call that was counted last and made this Routing, after settle(). While outcomes are unknown, the
  /// numbers of ranks may differ.
  std::int64_t number_of_route(const RoutingState& made);

 private:
  std::int64_t num_calls_ = 0;
  std::deque<std::shared_ptr<UnsettledCalls>> unsettled_;  // in the order of their routes, which run one after another
};

}  // namespace ferry

#endif  // FERRY_CORE_CALL_NUMBERS_HPP
