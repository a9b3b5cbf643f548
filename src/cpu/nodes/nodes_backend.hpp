#ifndef FERRY_CPU_NODES_NODES_BACKEND_HPP
#define FERRY_CPU_NODES_NODES_BACKEND_HPP

/// The CPU backend over several nodes. Between nodes a token crosses the network once per destination node, on the rail
/// of its source, whose peer there (the forwarder) writes it into its final rows; combine walks the same way back:
///
///   dispatch   x ──ring──> forwarder ──copy──> out.x of each rank of its node that owns an expert
///   combine    rows of the node's ranks ──sum──> forwarder ──ring──> source, which sums over nodes
///
/// Inside a node ranks reach each other's memory as on one node (node::Crew).

#include <memory>

#include "core/backend.hpp"
#include "cpu/staging.hpp"
#include "hop/collective.hpp"
#include "hop/rails.hpp"
#include "node/crew.hpp"

namespace ferry::cpu {

class NodesBackend final : public Backend {
 public:
  static Result<std::unique_ptr<Backend>> create(const BackendContext& context);

  std::string_view name() const override { return "cpu"; }
  bool takes_streams() const override { return false; }
  bool memory_is_on_host() const override { return true; }
  Result<Buffer> allocate(std::size_t bytes) override { return crew_.arena().allocate(bytes); }
  MemoryUsage memory_usage() const override;
  NetworkUsage network_usage() override;
  Result<std::shared_ptr<RoutingState>> route(const RouteCall& call) override;
  Status dispatch(const DispatchCall& call) override;
  Status combine(const CombineCall& call) override;
  Status wait(Stream /*stream*/) override { return crew_.broken(); }
  Status destroy() override;

 private:
  NodesBackend(const BackendContext& context, node::Rendezvous rendezvous);
  /// This rank ran out of memory inside a call: the others must not wait for it.
  Status out_of_memory(Operation operation);

  Topology topology_;
  node::Crew crew_;
  std::unique_ptr<hop::Rails> rails_;
  std::unique_ptr<hop::Collective> collective_;
  Staging staging_;
};

}  // namespace ferry::cpu

#endif  // FERRY_CPU_NODES_NODES_BACKEND_HPP
