#include "cpu/nodes/nodes_backend.hpp"

#include <fmt/format.h>

#include <new>

#include "cpu/nodes/operations.hpp"

namespace ferry::cpu {

NodesBackend::NodesBackend(const BackendContext& context, node::Rendezvous rendezvous)
    : topology_(context.topology), crew_(context, std::move(rendezvous)), staging_(crew_.shared_arena()) {}

Result<std::unique_ptr<Backend>> NodesBackend::create(const BackendContext& context) {
  Result<node::Rendezvous> met = node::rendezvous(context);
  if (!met.ok()) return met.status();
  std::unique_ptr<NodesBackend> backend(new NodesBackend(context, std::move(*met)));
  Result<std::unique_ptr<hop::Rails>> rails = hop::Rails::create(context, backend->crew_);
  if (!rails.ok()) return rails.status();
  backend->rails_ = std::move(*rails);
  backend->collective_ = std::make_unique<hop::Collective>(backend->crew_, *backend->rails_);
  return std::unique_ptr<Backend>(std::move(backend));
}

Result<std::shared_ptr<RoutingState>> NodesBackend::route(const RouteCall& call) try {
  return nodes::route(call, {crew_, *rails_, *collective_, staging_});
} catch (const std::bad_alloc&) {
  return out_of_memory(Operation::kRoute);
}

Status NodesBackend::dispatch(const DispatchCall& call) try {
  return nodes::dispatch(call, {crew_, *rails_, *collective_, staging_});
} catch (const std::bad_alloc&) {
  return out_of_memory(Operation::kDispatch);
}

Status NodesBackend::combine(const CombineCall& call) try {
  return nodes::combine(call, {crew_, *rails_, *collective_, staging_});
} catch (const std::bad_alloc&) {
  return out_of_memory(Operation::kCombine);
}

Status NodesBackend::out_of_memory(Operation operation) {
  return crew_.fail(ErrorCode::kSystem, crew_.rank(),
                    fmt::format("{}: rank {} ran out of memory; use smaller batches or a machine with more",
                                to_string(operation), crew_.rank()));
}

MemoryUsage NodesBackend::memory_usage() const {
  MemoryUsage usage;
  const std::size_t notices_bytes = node::round_up_to_page(rails_->notices_bytes());
  usage.control_bytes = node::kControlBytes;
  usage.network_bytes = rails_->memory_bytes() + notices_bytes;
  usage.staging_bytes = staging_.held_bytes();
  usage.allocated_bytes = crew_.arena().allocated_bytes() - usage.staging_bytes - notices_bytes;
  return usage;
}

NetworkUsage NodesBackend::network_usage() {
  NetworkUsage usage;
  usage.transport = rails_->engine_name();
  for (int node = 0; node < rails_->num_nodes(); ++node) {
    if (node == rails_->node()) continue;
    const net::PeerTraffic traffic = rails_->traffic(node);
    usage.rails.push_back({rails_->rank_of(node), traffic.put_bytes, traffic.num_puts + traffic.num_notifies, {}});
  }
  for (const net::Route& route : rails_->routes()) {
    for (RailUsage& rail : usage.rails) {
      if (rail.rank == rails_->rank_of(route.peer)) rail.route = route.description;
    }
  }
  return usage;
}

Status NodesBackend::destroy() {
  if (!crew_.broken().ok()) return crew_.broken();
  node::Ticket ticket;
  ticket.record.operation = Operation::kDestroy;
  return collective_->begin(ticket);
}

}  // namespace ferry::cpu
