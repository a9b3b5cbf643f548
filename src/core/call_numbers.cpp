#include "core/call_numbers.hpp"

namespace ferry {

void CallNumbers::count_on(const RoutingState* routing) {
  UnsettledCalls* const calls = routing != nullptr ? routing->unsettled.get() : nullptr;
  const RouteOutcome outcome = calls != nullptr ? calls->outcome.load() : RouteOutcome::kRouted;
  if (outcome == RouteOutcome::kRefused && calls->is_settled) return;
  ++num_calls_;
  if (calls != nullptr && !calls->is_settled) ++calls->num_calls;
}

std::int64_t CallNumbers::number_of_route(const std::shared_ptr<const RoutingState>& made) {
  std::erase_if(unsettled_, [this](const Unsettled& one) {
    if (const auto routing = one.routing.lock()) routing->look_for_outcome();
    const RouteOutcome outcome = one.calls->outcome.load();
    if (outcome == RouteOutcome::kUnknown) return false;
    if (outcome == RouteOutcome::kRefused) num_calls_ -= one.calls->num_calls;
    one.calls->is_settled = true;
    return true;
  });
  if (made->unsettled != nullptr) unsettled_.push_back({made, made->unsettled});
  return num_calls_ - 1;
}

}  // namespace ferry
