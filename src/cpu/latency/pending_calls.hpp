#ifndef FERRY_CPU_LATENCY_PENDING_CALLS_HPP
#define FERRY_CPU_LATENCY_PENDING_CALLS_HPP

/// Split calls of latency mode on CPU ranks. The send half only keeps its arguments, since nothing could move rows
/// beside the rank's own thread. The first receive half that needs the calls, or the next call of another kind, makes
/// them in the order in which they were sent, so all ranks make all calls in one order, whatever the order of their
/// receive halves.

#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <variant>

#include "core/backend.hpp"
#include "cpu/context/routing.hpp"

namespace ferry::cpu {

class PendingCalls {
 public:
  struct Call {
    std::shared_ptr<const RoutingState> routing;  ///< Routing that a dispatch fills, or that a combine uses
    std::variant<std::monostate, LatencyDispatchCall, LatencyCombineCall> arguments;  ///< until the call is made
    std::optional<Status> outcome{};                                                  ///< once the call was made
  };

  void add(Call call) { calls_.push_back(std::move(call)); }

  /// Makes all calls up to the one on `routing` with `make(call)`, and returns that call's outcome, once.
  template <typename Make>
  Status receive(const std::shared_ptr<const RoutingState>& routing, Make&& make) {
    for (auto call = calls_.begin(); call != calls_.end(); ++call) {
      make_one(*call, make);
      if (call->routing != routing) continue;
      Status outcome = *std::move(call->outcome);
      calls_.erase(call);
      forget_dropped();
      return outcome;
    }
    return Status(ErrorCode::kInternal, "latency_receive: the split call was lost; please report this bug");
  }

  /// Makes all calls; their outcomes are kept for their receive halves.
  template <typename Make>
  void make_all(Make&& make) {
    for (Call& call : calls_) make_one(call, make);
    forget_dropped();
  }

 private:
  template <typename Make>
  static void make_one(Call& call, Make&& make) {
    if (call.outcome) return;
    call.outcome = make(call);
    call.arguments = std::monostate();
  }
  /// Forgets calls that were made and cannot be received any more: the program has dropped their Routings.
  void forget_dropped() {
    std::erase_if(calls_, [](const Call& call) { return call.outcome && call.routing.use_count() == 1; });
  }

  std::deque<Call> calls_;
};

}  // namespace ferry::cpu

#endif  // FERRY_CPU_LATENCY_PENDING_CALLS_HPP
