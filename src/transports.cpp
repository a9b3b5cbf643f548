#include "ferry/transports.hpp"

#include "net/engine.hpp"

namespace ferry {

std::vector<TransportInfo> transports() {
  std::vector<TransportInfo> infos;
  for (const net::EngineFactory& factory : net::engine_factories()) {
    const Status status = factory.probe();
    infos.push_back(
        {std::string(factory.name), std::string(factory.description), status.ok(), std::string(status.message())});
  }
  return infos;
}

}  // namespace ferry
