/// Registry of every backend and every network engine of this build. New ones are added here.

#include <array>

#include "core/backend.hpp"
#include "cpu/backend.hpp"
#include "ferry/backends.hpp"
#include "ferry/transports.hpp"
#include "net/engine.hpp"
#include "net/loopback/engine.hpp"
#include "net/ucx/engine.hpp"
#include "one_sided/cpu_backend.hpp"
#include "rail/ring_memory.hpp"
#if defined(FERRY_WITH_CUDA)
#include "cuda/backend.hpp"
#include "cuda/context/gpu_direct.hpp"
#include "cuda/one_sided/backend.hpp"
#endif

namespace ferry {

std::span<const BackendFactory> backend_factories() {
  static const std::array factories = {
#if defined(FERRY_WITH_CUDA)
    cuda::backend_factory(),
#endif
    cpu::cpu_backend_factory(),
  };
  return factories;
}

std::span<const one_sided::BackendFactory> one_sided::backend_factories() {
  static const std::array factories = {
#if defined(FERRY_WITH_CUDA)
    cuda::one_sided_backend_factory(),
#endif
    one_sided::cpu_backend_factory(),
  };
  return factories;
}

std::span<const net::EngineFactory> net::engine_factories() {
  static constexpr std::array<EngineFactory, 2> kFactories{
      EngineFactory{.name = "ucx",
                    .description = "UCX: TCP, InfiniBand and RoCE, shared memory",
                    .probe = ucx::probe,
                    .create = ucx::create_engine,
                    .devices_variable = "UCX_NET_DEVICES",
                    .library = ucx::library_in_use,
                    .gpu_memory = ucx::gpu_memory_fact},
      EngineFactory{.name = "loopback",
                    .description = "memory of one process, for tests",
                    .probe = loopback::probe,
                    .create = loopback::create_engine},
  };
  return kFactories;
}

namespace {

template <typename Info, typename Factories>
std::vector<Info> describe(const Factories& factories) {
  std::vector<Info> infos;
  for (const auto& factory : factories) {
    const Status status = factory.probe();
    Info& info = infos.emplace_back();
    info.name = factory.name;
    info.description = factory.description;
    info.available = status.ok();
    info.reason = status.message();
  }
  return infos;
}

}  // namespace

std::vector<BackendInfo> backends() { return describe<BackendInfo>(backend_factories()); }

std::vector<TransportInfo> transports() {
  std::vector<TransportInfo> infos = describe<TransportInfo>(net::engine_factories());
  for (std::size_t i = 0; i < infos.size(); ++i) {
    const net::EngineFactory& factory = net::engine_factories()[i];
    if (factory.library != nullptr) infos[i].library = factory.library();
  }
  return infos;
}

std::vector<GpuDirectFact> gpu_direct_facts(const std::string& transport, [[maybe_unused]] int device) {
#if defined(FERRY_WITH_CUDA)
  const rail::GpuPart gpu = cuda::gpu_direct_part(device);
#else
  const rail::GpuPart gpu{{"gpu", false, "this build has no CUDA backend", "build with -DFERRY_CUDA=ON"}, false};
#endif
  return rail::gpu_direct_facts(gpu, transport);
}

}  // namespace ferry
