#ifndef FERRY_CPU_CPU_BACKEND_HPP
#define FERRY_CPU_CPU_BACKEND_HPP

/// The CPU backend: ranks of one host, as processes or threads, that copy rows straight into each other's memory.

#include <memory>

#include "core/backend.hpp"
#include "cpu/staging.hpp"
#include "node/crew.hpp"

namespace ferry::cpu {

using node::Crew;
using node::Location;
using node::Phase;
using node::Rendezvous;
using node::Ticket;

class CpuBackend final : public Backend {
 public:
  static Result<std::unique_ptr<Backend>> create(const BackendContext& context);

  CpuBackend(const BackendContext& context, Rendezvous rendezvous);

  std::string_view name() const override { return "cpu"; }
  bool takes_streams() const override { return false; }
  bool memory_is_on_host() const override { return true; }
  Result<Buffer> allocate(std::size_t bytes) override;
  MemoryUsage memory_usage() const override;
  Result<std::shared_ptr<RoutingState>> route(const RouteCall& call) override;
  Status dispatch(const DispatchCall& call) override;
  Status combine(const CombineCall& call) override;
  Status wait(Stream /*stream*/) override { return crew_.broken(); }
  Status destroy() override;

 private:
  Result<std::shared_ptr<RoutingState>> run_route(const RouteCall& call);
  Status run_dispatch(const DispatchCall& call);
  Status run_combine(const CombineCall& call);
  /// This rank ran out of memory inside a call: the others must not wait for it.
  Status out_of_memory(Operation operation);

  Topology topology_;
  Crew crew_;
  Staging staging_;
};

/// Entry of the registry.
BackendFactory cpu_backend_factory();

}  // namespace ferry::cpu

#endif  // FERRY_CPU_CPU_BACKEND_HPP
