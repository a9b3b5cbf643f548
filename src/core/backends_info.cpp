#include "core/backend.hpp"
#include "ferry/backends.hpp"

namespace ferry {

std::vector<BackendInfo> backends() {
  std::vector<BackendInfo> infos;
  for (const BackendFactory& factory : backend_factories()) {
    const Status status = factory.probe();
    infos.push_back(
        {std::string(factory.name), std::string(factory.description), status.ok(), std::string(status.message())});
  }
  return infos;
}

}  // namespace ferry
