#include "cuda/internode/calls.hpp"
#include "cuda/internode/kernel_routing.hpp"
#include "cuda/internode/node_route_steps.hpp"

/// A route that no host waits for.

namespace ferry::cuda::internode {

Result<std::shared_ptr<RoutingState>> bounded_route(Context& context, Placements& placements, const RouteCall& call,
                                                    bool captured) {
  const auto refused = [&context, &call](const Status& status) {
    return refuse(context, call.record, call.stream, status);
  };
  const Parts& parts = context.parts();
  const Topology& topology = parts.sync->topology();
  auto routing = std::make_shared<NodesRouting>();
  const Result<NodeRouteInput> input = begin_routing(
      context, placements, {call, to_string(Operation::kRoute), call.options.max_tokens, false, captured}, *routing);
  if (!input.ok()) return refused(input.status());
  const Result<std::byte*> room =
      context.staging().rows(StagedBy::kRoute, NodeRouteStaging::at(nullptr, topology, *input).size_bytes, captured);
  if (!room.ok()) return refused(room.status());
  const NodeRouteStaging staging = NodeRouteStaging::at(*room, topology, *input);
  KernelOptions kernel;
  kernel.num_sms = call.options.num_sms;

  const Result<Launch> begun = context.begin(call.record, static_cast<cudaStream_t>(call.stream.handle), captured);
  if (!begun.ok()) return refused(begun.status());
  parts.rail_link->wake();
  const cudaError_t error =
      launch(node_route_steps(place_of(parts), topology, identity_of(context, call.record, *begun), *input, staging,
                              blocks_of(parts, kernel)),
             begun->stream);
  Status ended = context.end(*begun, error, to_string(Operation::kRoute));
  if (!ended.ok()) return ended;
  return std::shared_ptr<RoutingState>(std::move(routing));
}

}  // namespace ferry::cuda::internode
