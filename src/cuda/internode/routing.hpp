#ifndef FERRY_CUDA_INTERNODE_ROUTING_HPP
#define FERRY_CUDA_INTERNODE_ROUTING_HPP

#include <memory>

#include "cuda/call/routing.hpp"
#include "cuda/internode/steps.hpp"

namespace ferry::cuda::internode {

/// A Routing over several nodes: its tables are on the GPU. Its counts are on the host, if hosts have routed; else they
/// come there as those of one node do.
struct NodesRouting : CudaRouting {
  RoutedTokens routed;
};

}  // namespace ferry::cuda::internode

#endif  // FERRY_CUDA_INTERNODE_ROUTING_HPP
