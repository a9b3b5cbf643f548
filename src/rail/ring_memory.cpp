#include "rail/ring_memory.hpp"

#include <fmt/format.h>

#include "net/engine.hpp"
#include "net/gpu_direct.hpp"

namespace ferry::rail {
namespace {

GpuDirectFact engine_fact(const std::string& transport) {
  for (const net::EngineFactory& factory : net::engine_factories()) {
    // "auto" uses the best engine, which is the first.
    if (transport != "auto" && transport != factory.name) continue;
    if (factory.gpu_memory != nullptr) return factory.gpu_memory();
    return {"network library", false, fmt::format("transport \"{}\" copies by processors", factory.name),
            "use transport \"ucx\""};
  }
  return {"network library", false, fmt::format("no transport \"{}\"", transport), "use transport \"ucx\""};
}

}  // namespace

std::vector<GpuDirectFact> gpu_direct_facts(const GpuPart& gpu, const std::string& transport) {
  return {gpu.registration, net::driver_fact(gpu.has_dma_buf), net::card_fact(net_devices()), engine_fact(transport)};
}

Status check_ring_memory(std::string_view wanted, const std::vector<GpuDirectFact>& facts) {
  if (wanted != "gpu") return {};
  std::string missing;
  for (const GpuDirectFact& fact : facts) {
    if (fact.present) continue;
    missing += fmt::format("{}{}: {} ({})", missing.empty() ? "" : "; ", fact.name, fact.observed, fact.advice);
  }
  if (missing.empty()) return {};
  return Status(
      ErrorCode::kUnsupported,
      fmt::format("Group::create: GroupOptions::ring_memory is \"gpu\", and rings cannot be in GPU memory here: {}",
                  missing));
}

}  // namespace ferry::rail
