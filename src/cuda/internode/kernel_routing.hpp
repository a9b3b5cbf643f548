#ifndef FERRY_CUDA_INTERNODE_KERNEL_ROUTING_HPP
#define FERRY_CUDA_INTERNODE_KERNEL_ROUTING_HPP

/// The host's part of a Routing over several nodes that kernels fill in.

#include <cstdint>
#include <string_view>

#include "cuda/context/context.hpp"
#include "cuda/internode/node_route_steps.hpp"
#include "cuda/internode/routing.hpp"
#include "cuda/placement/placements.hpp"

namespace ferry::cuda::internode {

/// A call whose tokens kernels route.
struct KernelRoute {
  const RouteCall& call;
  std::string_view name;
  std::int64_t max_tokens = 0;
  bool captured = false;
};

/// Allocates the tables of `routing` and sets all fields that are known; returns the input of the kernels.
/// @errors kUnsupported, kInvalidArgument: larger than the kernels can count; kCapacity and other errors of memory
Result<NodeRouteInput> begin_routing(Context& context, Placements& placements, const KernelRoute& route,
                                     NodesRouting& routing);

}  // namespace ferry::cuda::internode

#endif  // FERRY_CUDA_INTERNODE_KERNEL_ROUTING_HPP
