#include "doctor/facts.hpp"

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/statvfs.h>

#include <cstdint>

#include "device/device_facts.hpp"
#include "device/device_memory.hpp"
#include "ferry/backends.hpp"
#include "ferry/bootstrap.hpp"
#include "ferry/transports.hpp"
#include "report/host_facts.hpp"

namespace ferry::tools {

namespace {

constexpr const char* kSharedMemory = "/dev/shm";

/// Null: no limit.
template <typename Resource>
Json limit_of(Resource resource) {
  rlimit limit{};
  if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return nullptr;
  return limit.rlim_cur;
}

/// Null: there is none.
Json shared_memory() {
  struct statvfs info {};
  if (statvfs(kSharedMemory, &info) != 0) return nullptr;
  return {{"path", kSharedMemory},
          {"size_bytes", std::uint64_t{info.f_blocks} * info.f_frsize},
          {"free_bytes", std::uint64_t{info.f_bavail} * info.f_frsize}};
}

Json gpus() {
  Json list = Json::array();
  const auto num_devices = count_devices();
  for (int device = 0; num_devices && device < *num_devices; ++device) {
    const auto facts = read_device_facts(device);
    if (!facts) continue;  // a finding has the error
    list.push_back({{"ordinal", facts->ordinal},
                    {"name", facts->name.data()},
                    {"pci_address", facts->pci_address.data()},
                    {"compute_capability", fmt::format("{}.{}", facts->compute_major, facts->compute_minor)},
                    {"num_sms", facts->num_sms},
                    {"memory_bytes", facts->memory_bytes},
                    {"shares_descriptors", facts->has_file_descriptor_handles},
                    {"nearest_net_devices", nearest_net_devices(facts->pci_address.data())}});
  }
  return list;
}

}  // namespace

Json read_facts() {
  Json facts;
  facts["limits"] = {{"open_files", limit_of(RLIMIT_NOFILE)},
                     {"locked_memory_bytes", limit_of(RLIMIT_MEMLOCK)},
                     {"address_space_bytes", limit_of(RLIMIT_AS)}};
  facts["shared_memory"] = shared_memory();
  facts["nvidia_driver"] = read_driver_module_version();
  facts["gpus"] = gpus();
  for (const char* list : {"backends", "transports", "net_devices", "launchers"}) facts[list] = Json::array();
  for (const BackendInfo& backend : backends()) {
    facts["backends"].push_back({{"name", backend.name}, {"available", backend.available}, {"reason", backend.reason}});
  }
  for (const TransportInfo& transport : transports()) {
    facts["transports"].push_back({{"name", transport.name},
                                   {"available", transport.available},
                                   {"reason", transport.reason},
                                   {"library", transport.library}});
  }
  for (const NetDeviceInfo& device : net_devices()) {
    facts["net_devices"].push_back({{"name", device.name},
                                    {"addresses", device.addresses},
                                    {"rdma", device.rdma},
                                    {"loopback", device.loopback},
                                    {"usable", device.usable},
                                    {"link_layer", device.link_layer},
                                    {"rate_gbps", device.rate_gbps}});
  }
  for (const LauncherVariables& seen : launcher_variables_from_environment()) {
    facts["launchers"].push_back(
        {{"launcher", seen.launcher}, {"rank", seen.rank.value}, {"num_ranks", seen.num_ranks.value}});
  }
  return facts;
}

}  // namespace ferry::tools
