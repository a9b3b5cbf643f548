#ifndef FERRY_CALL_ROUTE_NODES_HPP
#define FERRY_CALL_ROUTE_NODES_HPP

/// Route over several nodes by the hosts, in two exchanges, each over the rails first and then inside the nodes:
///   1. counts: every rank learns the number of rows from every rank to every rank and expert, which determines its
///      own slots;
///   2. forward tables: every rank sends its rail peers the list of its tokens that go to their nodes, with their
///      destinations.
/// No rank sends to more ranks than there are nodes, and every number crosses the network once per node.

#include <cstdint>
#include <span>

#include "call/call_sync.hpp"
#include "plan/node_route.hpp"

namespace ferry::call {

/// Memory of this rank's arena, in host memory, for the tables that the ranks of its node read. Each function is called
/// once in a route, in this order. A peer may still read the tables of the previous route; it cannot be two routes
/// behind.
class RouteMemory {
 public:
  virtual Result<std::byte*> counts(std::size_t bytes) = 0;
  virtual Result<std::byte*> forward_tables(std::size_t bytes) = 0;

 protected:
  ~RouteMemory() = default;
};

struct NodesRouteCall {
  CallRecord record;
  plan::RouteShape shape;
  std::span<const std::int64_t> ids;  ///< [T, K], -1 or below: no expert
  std::int64_t max_recv_rows = 0;
};

/// Collective. Reuses the memory of `route`; an error leaves its contents unspecified.
Status route_nodes(CallSync& sync, const NodesRouteCall& call, RouteMemory& memory, plan::NodeRoute& route);

}  // namespace ferry::call

#endif  // FERRY_CALL_ROUTE_NODES_HPP
