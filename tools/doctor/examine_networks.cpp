#include <dlfcn.h>
#include <fmt/format.h>

#include <string>
#include <vector>

#include "doctor/finding.hpp"
#include "ferry/transports.hpp"

namespace ferry::tools {

namespace {

/// Of the library that the engine has loaded, e.g. "1.13.1"; empty where it has not. Loads nothing.
std::string loaded_ucx_version() {
  void* ucp = dlopen("libucp.so.0", RTLD_NOW | RTLD_NOLOAD);
  if (ucp == nullptr) return "";
  using GetVersion = const char* (*)();
  const auto get_version = reinterpret_cast<GetVersion>(dlsym(ucp, "ucp_get_version_string"));
  const std::string version = get_version == nullptr ? "" : get_version();
  dlclose(ucp);  // the engine keeps it
  return version;
}

}  // namespace

std::vector<Finding> examine_networks() {
  std::vector<Finding> findings;
  for (const TransportInfo& transport : transports()) {
    Finding finding{transport.available ? Health::kOk : Health::kMissing, fmt::format("net {}", transport.name),
                    transport.description, transport.reason};
    if (transport.name == "ucx" && transport.available)
      finding.observed += fmt::format("; version {}", loaded_ucx_version());
    findings.push_back(std::move(finding));
  }
  return findings;
}

}  // namespace ferry::tools
