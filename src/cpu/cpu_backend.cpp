#include "cpu/cpu_backend.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <new>

#include "cpu/nodes/nodes_backend.hpp"

namespace ferry::cpu {
namespace {

Status probe() {
  const node::UniqueFd fd(memfd_create("ferry-probe", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.valid()) return {};
  return Status(ErrorCode::kUnsupported,
                fmt::format("memfd_create failed: {}; the CPU backend needs Linux 3.17 and a sandbox that allows it",
                            std::strerror(errno)));
}

}  // namespace

CpuBackend::CpuBackend(const BackendContext& context, Rendezvous rendezvous)
    : topology_(context.topology), crew_(context, std::move(rendezvous)), staging_(crew_.shared_arena()) {}

Result<std::unique_ptr<Backend>> CpuBackend::create(const BackendContext& context) {
  if (context.topology.num_nodes() > 1) return NodesBackend::create(context);
  Result<Rendezvous> met = node::rendezvous(context);
  if (!met.ok()) return met.status();
  return std::unique_ptr<Backend>(std::make_unique<CpuBackend>(context, std::move(*met)));
}

Result<Buffer> CpuBackend::allocate(std::size_t bytes) { return crew_.arena().allocate(bytes); }

Result<std::shared_ptr<RoutingState>> CpuBackend::route(const RouteCall& call) try {
  return run_route(call);
} catch (const std::bad_alloc&) {
  return out_of_memory(Operation::kRoute);
}

Status CpuBackend::dispatch(const DispatchCall& call) try { return run_dispatch(call); } catch (const std::bad_alloc&) {
  return out_of_memory(Operation::kDispatch);
}

Status CpuBackend::combine(const CombineCall& call) try { return run_combine(call); } catch (const std::bad_alloc&) {
  return out_of_memory(Operation::kCombine);
}

Status CpuBackend::out_of_memory(Operation operation) {
  return crew_.fail(ErrorCode::kSystem, crew_.rank(),
                    fmt::format("{}: rank {} ran out of memory; use smaller batches or a machine with more",
                                to_string(operation), crew_.rank()));
}

MemoryUsage CpuBackend::memory_usage() const {
  MemoryUsage usage;
  usage.control_bytes = node::kControlBytes;
  usage.staging_bytes = staging_.held_bytes();
  usage.allocated_bytes = crew_.arena().allocated_bytes() - usage.staging_bytes;
  return usage;
}

Status CpuBackend::destroy() {
  if (!crew_.broken().ok()) return crew_.broken();
  Ticket ticket;
  ticket.record.operation = Operation::kDestroy;
  return crew_.begin(ticket);
}

BackendFactory cpu_backend_factory() {
  return {"cpu", "ranks of one host through shared memory, of several over a network", probe, CpuBackend::create};
}

}  // namespace ferry::cpu
