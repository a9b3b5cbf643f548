/// A route of bounded rows and tokens, which no host waits for.

#include <optional>

#include "cuda/call/group_call.hpp"
#include "cuda/internode/calls.hpp"
#include "cuda/internode/kernel_routing.hpp"
#include "cuda/internode/node_route_steps.hpp"
#include "cuda/memory/memory_checks.hpp"

namespace ferry::cuda::internode {
namespace {

class BoundedRoute {
 public:
  BoundedRoute(Context& context, Placements& placements, const RouteCall& call)
      : context_(context), placements_(placements), call_(call) {}

  Status prepare(const CallStream& stream);
  cudaError_t launch(const Launch& launch);
  cudaError_t launch_refusal(const Launch& launch, const CallRecord& refused) const {
    return launch_refusal_of(context_, launch, refused);
  }
  std::shared_ptr<RoutingState> take() { return std::move(routing_); }

 private:
  const Topology& topology() const { return context_.parts().sync->topology(); }

  Context& context_;
  Placements& placements_;
  const RouteCall& call_;
  std::shared_ptr<NodesRouting> routing_;
  std::optional<NodeRouteInput> input_;
  NodeRouteStaging staging_;
};

Status BoundedRoute::prepare(const CallStream& stream) {
  if (Status status = check_route_memory(call_, *context_.parts().arena); !status.ok()) return status;
  routing_ = std::make_shared<NodesRouting>();
  const Result<NodeRouteInput> input =
      begin_routing(context_, placements_,
                    {call_, to_string(Operation::kRoute), call_.options.max_tokens, stream.captured}, *routing_);
  if (!input.ok()) return input.status();
  input_ = *input;
  const Result<std::byte*> room = context_.staging().rows(
      StagedBy::kRoute, NodeRouteStaging::at(nullptr, topology(), *input_).size_bytes, stream.captured);
  if (!room.ok()) return room.status();
  staging_ = NodeRouteStaging::at(*room, topology(), *input_);
  return {};
}

cudaError_t BoundedRoute::launch(const Launch& begun) {
  const Parts& parts = context_.parts();
  parts.rail_link->wake();
  return cuda::launch(node_route_steps(place_of(parts), topology(), identity_of(context_, call_.record, begun), *input_,
                                       staging_, blocks_of_route(parts, call_.options.num_sms)),
                      begun.stream);
}

}  // namespace

Result<std::shared_ptr<RoutingState>> bounded_route(Context& context, Placements& placements, const RouteCall& call) {
  BoundedRoute route(context, placements, call);
  Status status = make_call({context, call.record, call.stream}, route);
  if (!status.ok()) return status;
  return route.take();
}

}  // namespace ferry::cuda::internode
