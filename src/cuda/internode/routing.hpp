#ifndef FERRY_CUDA_INTERNODE_ROUTING_HPP
#define FERRY_CUDA_INTERNODE_ROUTING_HPP

#include <memory>

#include "core/routing_state.hpp"
#include "cuda/internode/steps.hpp"
#include "cuda/intranode/placements.hpp"

namespace ferry::cuda::internode {

/// A Routing over several nodes: its tables are on the GPU, its counts on the host.
struct NodesRouting : RoutingState {
  RoutedTokens routed;
  std::shared_ptr<std::byte> memory;
  std::shared_ptr<const Placement> placement;
  bool exact_rows = false;  ///< outputs have no row beyond the used ones
};

}  // namespace ferry::cuda::internode

#endif  // FERRY_CUDA_INTERNODE_ROUTING_HPP
