#ifndef FERRY_CUDA_INTERNODE_ROUTING_HPP
#define FERRY_CUDA_INTERNODE_ROUTING_HPP

#include <memory>

#include "cuda/internode/steps.hpp"
#include "cuda/intranode/routing.hpp"

namespace ferry::cuda::internode {

/// A Routing over several nodes: its tables are on the GPU. Its counts are on the host at once if hosts have routed;
/// otherwise kernels report them as for one node.
struct NodesRouting : CudaRouting {
  RoutedTokens routed;
};

}  // namespace ferry::cuda::internode

#endif  // FERRY_CUDA_INTERNODE_ROUTING_HPP
