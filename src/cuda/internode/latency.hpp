#ifndef FERRY_CUDA_INTERNODE_LATENCY_HPP
#define FERRY_CUDA_INTERNODE_LATENCY_HPP

/// Latency mode of GPU ranks on several nodes: a route by kernels together with a dispatch in one call, and a combine.
/// A split call runs on a stream of the group, beside the program's work between its two halves; a captured call runs
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
  /// Waits for the counts, but only after the call was received: before that, no caller waits for them.
  void settle() const override {
    if (received.load(std::memory_order_acquire)) CudaRouting::settle();
  }
  bool dispatch_failed() const override { return received.load(std::memory_order_acquire) && counts_state() == 2; }

  std::shared_ptr<StreamPoint> sent;  ///< end of the latest split call; null: that call was captured
  std::vector<std::shared_ptr<StreamPoint>> awaited_by_graphs;  ///< held so that no other call takes them meanwhile
  std::atomic<bool> received{false};  ///< the rows are complete in stream order, and kernels report the counts to the
                                      ///< host
};

class NodesLatency {
 public:
  /// All arguments must outlive this object. `side`: in groups of several nodes.
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
