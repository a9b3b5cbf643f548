#include <array>

#include "net/engine.hpp"
#include "net/loopback/engine.hpp"
#include "net/ucx/engine.hpp"

namespace ferry::net {

std::span<const EngineFactory> engine_factories() {
  static constexpr std::array<EngineFactory, 2> kFactories{
      EngineFactory{.name = "ucx",
                    .description = "UCX: TCP, InfiniBand and RoCE, shared memory",
                    .probe = ucx::probe,
                    .create = ucx::create_engine},
      EngineFactory{.name = "loopback",
                    .description = "the memory of one process, for tests",
                    .probe = loopback::probe,
                    .create = loopback::create_engine},
  };
  return kFactories;
}

}  // namespace ferry::net
