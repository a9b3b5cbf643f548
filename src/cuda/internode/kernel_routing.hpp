#ifndef FERRY_CUDA_INTERNODE_KERNEL_ROUTING_HPP
#define FERRY_CUDA_INTERNODE_KERNEL_ROUTING_HPP

/// A Routing over several nodes that kernels fill in, on the host.

#include <cstdint>
#include <string_view>

#include "cuda/context/context.hpp"
#include "cuda/internode/node_route_steps.hpp"
#include "cuda/internode/routing.hpp"
#include "cuda/placement/placements.hpp"

namespace ferry::cuda::internode {

/// A call that kernels route.
struct KernelRoute {
  const RouteCall& call;
  std::string_view name;
  std::int64_t max_tokens = 0;
  bool latency = false;  ///< with source ranges, which only Routings of latency mode have
  bool captured = false;
};

/// Bytes of the tables of a Routing of `num_rows` rows.
std::size_t kernel_tables_bytes(const Topology& topology, const NodeRouteInput& input, std::int64_t num_rows,
                                bool weights, bool latency);

/// Takes memory for the tables of `routing` and sets all that is known of it; returns what the kernels need.
/// @errors kUnsupported, kInvalidArgument: larger than the kernels can count; kCapacity and others of memory
Result<NodeRouteInput> begin_routing(Context& context, Placements& placements, const KernelRoute& route,
                                     NodesRouting& routing);

}  // namespace ferry::cuda::internode

#endif  // FERRY_CUDA_INTERNODE_KERNEL_ROUTING_HPP
