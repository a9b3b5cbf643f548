#ifndef FERRY_CORE_CALL_NUMBERS_HPP
#define FERRY_CORE_CALL_NUMBERS_HPP

/// Number of calls that a group's ranks have made together. Ranks compare it to check that their Routings are of the
/// same route, so all must count alike: refused calls too, and calls of different kinds. Calls on a Routing whose route
/// was refused count as well, unless some ranks learned of the refusal at once and make no such calls: then the calls
/// of the other ranks are subtracted as soon as these learn of it.
///
/// Where graphs may be replayed, hosts do not see all calls of latency mode, and a process that takes a lost rank's
/// place captures them later than the others did. There these calls are apart from the others, and their numbers count
/// from the dispatch that made the Routing.

#include <cstdint>
#include <deque>
#include <memory>

#include "core/routing_state.hpp"

namespace ferry {

/// Numbers of one group, whose calls run one at a time.
class CallNumbers {
 public:
  /// `replays`: whether calls may be captured in graphs.
  explicit CallNumbers(bool replays) : replays_(replays) {}

  /// Counts a call.
  void count() { ++num_calls_; }
  /// Counts a call on this Routing, which may be null.
  void count_on(const RoutingState* routing);
  /// Applies the known outcomes of earlier routes, and releases the memory that reported them: routes need it.
  void settle();
  /// Number of the call that was counted last and made this Routing, after settle(). While outcomes are unknown, the
  /// numbers of ranks may differ.
  std::int64_t number_of_route(const RoutingState& made);

  /// Counts a call of latency mode.
  void count_latency();
  /// Numbers the Routing of a dispatch that was counted last.
  void number_dispatch(RoutingState& made);
  /// Number by which ranks compare the Routings of a combine that was counted last.
  std::int64_t number_of_combine(const RoutingState& routing) const {
    return replays_ ? num_latency_calls_ - routing.latency_number : routing.call_number;
  }

 private:
  const bool replays_;
  std::int64_t num_calls_ = 0;
  std::int64_t num_latency_calls_ = 0;                     // these are among num_calls_ too unless calls are replayed
  std::deque<std::shared_ptr<UnsettledCalls>> unsettled_;  // in the order of their routes, which run one after another
};

}  // namespace ferry

#endif  // FERRY_CORE_CALL_NUMBERS_HPP
