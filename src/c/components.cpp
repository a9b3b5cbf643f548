/// C interface of the version and of the components of this build and machine.

#include <string>
#include <vector>

#include "c/status.hpp"
#include "ferry/backends.hpp"
#include "ferry/ferry.h"
#include "ferry/transports.hpp"
#include "ferry/version.hpp"

struct ferry_component_list {               // NOLINT(readability-identifier-naming)
  std::vector<ferry::TransportInfo> infos;  // owns the strings that the components point to
  std::vector<ferry_component> components;
};

namespace ferry::c {
namespace {

Status make_list(const char* call, std::vector<TransportInfo> infos, ferry_component_list** list) {
  if (list == nullptr) return invalid(call, "the pointer to the list is null");
  auto made = std::make_unique<ferry_component_list>();
  made->infos = std::move(infos);
  for (const TransportInfo& info : made->infos) {
    ferry_component component{};
    component.struct_size = sizeof(component);
    component.name = info.name.c_str();
    component.description = info.description.c_str();
    component.reason = info.reason.c_str();
    component.library = info.library.c_str();
    component.available = info.available ? 1 : 0;
    made->components.push_back(component);
  }
  *list = made.release();
  return {};
}

std::vector<TransportInfo> backend_infos() {
  std::vector<TransportInfo> infos;
  for (BackendInfo& backend : backends()) {
    TransportInfo& info = infos.emplace_back();
    info.name = std::move(backend.name);
    info.description = std::move(backend.description);
    info.available = backend.available;
    info.reason = std::move(backend.reason);
  }
  return infos;
}

}  // namespace
}  // namespace ferry::c

using namespace ferry::c;

uint32_t ferry_abi_version() { return FERRY_ABI_VERSION; }
const char* ferry_version() { return ferry::version(); }
const char* ferry_commit() { return ferry::commit(); }

ferry_status* ferry_backends(ferry_component_list** list) {
  return guarded([&] { return make_list("ferry_backends", backend_infos(), list); });
}

ferry_status* ferry_transports(ferry_component_list** list) {
  return guarded([&] { return make_list("ferry_transports", ferry::transports(), list); });
}

int64_t ferry_component_list_size(const ferry_component_list* list) {
  return list == nullptr ? 0 : static_cast<int64_t>(list->components.size());
}

const ferry_component* ferry_component_list_at(const ferry_component_list* list, int64_t index) {
  if (index < 0 || index >= ferry_component_list_size(list)) return nullptr;
  return &list->components[static_cast<std::size_t>(index)];
}

void ferry_component_list_free(ferry_component_list* list) { delete list; }
