#ifndef FERRY_CORE_ROUTING_STATE_HPP
#define FERRY_CORE_ROUTING_STATE_HPP

/// State of a Routing. Backends derive from it to own the tables that the views point to.

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "ferry/routing.hpp"

namespace ferry {

/// State of a Routing of latency mode, which decides the calls it may be used in.
enum class LatencyPhase {
  kNone,            ///< not a Routing of latency mode
  kDispatchSent,    ///< its dispatch has yet to be received
  kReady,           ///< its rows are complete, or will be in stream order
  kCombineSent,     ///< a combine has yet to be received
  kDispatchFailed,  ///< its rows will never arrive
};

enum class RouteOutcome {
  kUnknown,
  kAllMakeCalls,   ///< the route took place, or all ranks learn late that it did not
  kSomeMakeCalls,  ///< the route was refused, and hosts of some ranks may have known so at once
};

/// Calls on a Routing made before the host knows whether its route took place. Used by CallNumbers alone, in the
/// group's calls.
struct UnsettledCalls {
  /// Returns the outcome as known by now, without waiting. Owns the memory that it reads, so it may outlive the
  /// Routing.
  std::function<RouteOutcome()> look;
  std::int64_t num_calls = 0;
  bool make_no_numbers = false;  ///< the outcome is kSomeMakeCalls, which has been applied
};

struct RoutingState {
  RoutingState() = default;
  RoutingState(const RoutingState&) = delete;
  RoutingState& operator=(const RoutingState&) = delete;
  virtual ~RoutingState() = default;

  /// Called before reads of results that are known only after the exchange: num_used_rows and everything below it
  /// except local_expert_ids. A backend that routes without the host fills those in here. May be called from any
  /// thread.
  virtual void settle() const {}
  /// Latency mode: whether the dispatch is known by now to have been refused, although latency_receive could not detect
  /// it. May change from false to true while other threads make calls.
  virtual bool dispatch_failed() const { return false; }

  std::shared_ptr<const void> group_identity;  ///< identity of the group that made the Routing
  /// CallNumbers' count; equal on all ranks once outcomes are known. Of latency mode on GPUs: less than 0
  std::int64_t call_number = 0;
  std::int64_t latency_number = 0;            ///< CallNumbers' count of latency mode at its dispatch, else 0
  std::shared_ptr<UnsettledCalls> unsettled;  ///< null: the host has the outcome, or never gets it (captured)

  /// Written only inside calls of the group.
  mutable LatencyPhase latency_phase = LatencyPhase::kNone;

  std::int64_t num_tokens = 0;
  int num_topk = 0;
  std::int64_t num_experts = 0;          ///< P; backends see only physical experts
  std::int64_t num_logical_experts = 0;  ///< E; core fills it in
  Layout layout = Layout::kTokens;
  std::int64_t num_recv_rows = 0;
  std::int64_t num_used_rows = 0;

  std::vector<std::int32_t> num_rows_per_local_expert;  ///< [L]
  std::vector<std::int64_t> expert_row_offsets;         ///< [L + 1], empty for kTokens
  std::vector<std::int64_t> num_rows_from_rank;         ///< [R]
  std::vector<std::int64_t> num_rows_to_rank;           ///< [R]
  bool may_repeat_experts = true;
  std::vector<std::int32_t> local_expert_ids;  ///< [L]

  ConstTensorView num_used_rows_view;    ///< [1] i32
  ConstTensorView rows_per_expert_view;  ///< [L] i32
  ConstTensorView row_offsets_view;      ///< [L + 1] i64, absent for kTokens
  ConstTensorView expert_rows_view;      ///< [P] i64, absent in latency mode on GPUs
  ConstTensorView slots;                 ///< [T, K] i32
  ConstTensorView source;                ///< [num_used_rows, 2] i32
  ConstTensorView source_ranges;         ///< [L, R, 2] i32, latency mode only
  ConstTensorView topk_idx;              ///< [T, K] i64
  ConstTensorView topk_weights;          ///< [T, K] f32 or absent
};

}  // namespace ferry

#endif  // FERRY_CORE_ROUTING_STATE_HPP
