#include "core/call_numbers.hpp"

namespace ferry {

void CallNumbers::count_on(const RoutingState* routing) {
  UnsettledCalls* const calls = routing != nullptr ? routing->unsettled.get() : nullptr;
  if (calls != nullptr && calls->make_no_numbers) return;
  ++num_calls_;
  if (calls != nullptr) ++calls->num_calls;
}

void CallNumbers::settle() {
  while (!unsettled_.empty()) {
    UnsettledCalls& calls = *unsettled_.front();
    const RouteOutcome outcome = calls.look();
    if (outcome == RouteOutcome::kUnknown) break;
    if (outcome == RouteOutcome::kSomeMakeCalls) {
      num_calls_ -= calls.num_calls;
      calls.make_no_numbers = true;
    }
    calls.look = {};  // memory that `look` holds is not needed any more
    unsettled_.pop_front();
  }
}

std::int64_t CallNumbers::number_of_route(const RoutingState& made) {
  settle();
  if (made.unsettled != nullptr) unsettled_.push_back(made.unsettled);
  return num_calls_ - 1;
}

void CallNumbers::count_latency() {
  ++num_latency_calls_;
  if (!replays_) count();
}

void CallNumbers::number_dispatch(RoutingState& made) {
  made.latency_number = num_latency_calls_;
  made.call_number = replays_ ? -num_latency_calls_ : number_of_route(made);
}

}  // namespace ferry
