#ifndef FERRY_CUDA_LATENCY_ROUTING_HPP
#define FERRY_CUDA_LATENCY_ROUTING_HPP

/// A Routing of latency mode on the host.

#include <atomic>
#include <cstdint>
#include <memory>

#include "cuda/call/routing.hpp"
#include "cuda/latency/params.hpp"

namespace ferry::cuda {

struct LatencyRouting final : CudaRouting {
  /// Does nothing until the receive half is launched: no counts come before.
  void settle() const override {
    if (received.load(std::memory_order_acquire)) CudaRouting::settle();
  }

  bool dispatch_failed() const override {
    if (succeeded.load(std::memory_order_relaxed) || !received.load(std::memory_order_acquire)) return false;
    const std::uint64_t state = counts_state();
    if (state == 1) succeeded.store(true, std::memory_order_relaxed);
    return state == 2;
  }

  LatencyTables latency;  ///< in `memory`
  std::int64_t max_tokens = 0;
  std::int64_t slab_capacity = 0;
  RouteResultTables host_tables;  ///< the host's tables as the GPU sees them; null in a graph
  // Only for split calls: others make a Routing for each dispatch, which should be small.
  std::unique_ptr<DispatchReceiveParams> dispatch_receive;
  std::unique_ptr<CombineReceiveParams> combine_receive;  ///< for the latest combine
  std::int64_t* wait_times_ns = nullptr;                  ///< of the call to be received; null: not asked for
  std::atomic<bool> received{false};  ///< the dispatch's receive half is launched, and will report the counts
  /// The dispatch was received and not refused, which does not change any more
  mutable std::atomic<bool> succeeded{false};
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LATENCY_ROUTING_HPP
