#ifndef FERRY_CUDA_INTERNODE_LATENCY_HPP
#define FERRY_CUDA_INTERNODE_LATENCY_HPP

/// Latency mode of GPU ranks on several nodes: a route by kernels and a dispatch in one call, and a combine. A split
/// call runs on a stream of the group's own, beside what the program does between its halves; one that is captured runs
/// where its send half is.

#include <atomic>
#include <memory>
#include <vector>

#include "core/backend.hpp"
#include "cuda/context/context.hpp"
#include "cuda/internode/calls.hpp"
#include "cuda/internode/routing.hpp"
#include "cuda/internode/side_stream.hpp"
#include "cuda/placement/placements.hpp"

namespace ferry::cuda::internode {

struct NodesLatencyRouting final : NodesRouting {
  /// Before it is received nobody waits for its counts.
  void settle() const override {
    if (received.load(std::memory_order_acquire)) CudaRouting::settle();
  }
  bool dispatch_failed() const override { return received.load(std::memory_order_acquire) && counts_state() == 2; }

  std::shared_ptr<StreamPoint> sent;  ///< the end of the latest split call; null: it was captured
  std::vector<std::shared_ptr<StreamPoint>> awaited_by_graphs;  ///< so that no other call takes them meanwhile
  std::atomic<bool> received{false};  ///< the rows are there in stream order, and the host is told the counts
};

class NodesLatency {
 public:
  /// All must outlive it. `side`: in groups of several nodes.
  NodesLatency(Context& context, Placements& placements, SideStream* side)
      : context_(context), placements_(placements), side_(side) {}

  Result<std::shared_ptr<RoutingState>> dispatch(const LatencyDispatchCall& call);
  Status combine(const LatencyCombineCall& call);
  Status receive(const LatencyReceiveCall& call, bool& made);

 private:
  Status make_receive(const LatencyReceiveCall& call, bool& made);

  Context& context_;
  Placements& placements_;
  SideStream* side_;
};

}  // namespace ferry::cuda::internode

#endif  // FERRY_CUDA_INTERNODE_LATENCY_HPP
