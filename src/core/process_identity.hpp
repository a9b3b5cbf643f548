#ifndef FERRY_CORE_PROCESS_IDENTITY_HPP
#define FERRY_CORE_PROCESS_IDENTITY_HPP

#include <cstdint>

#include "core/host_identity.hpp"

namespace ferry {

/// Identifies a host and a process on it. Plain bytes, exchanged at creation.
struct ProcessIdentity {
  BootId boot_id{};
  std::uint64_t pid_namespace = 0;     ///< inode of the process-id namespace
  std::uint64_t start_time_ticks = 0;  ///< distinguishes a process from a later one with the same id
  std::int64_t pid = 0;

  bool same_host(const ProcessIdentity& other) const { return boot_id == other.boot_id; }
  bool operator==(const ProcessIdentity& other) const = default;
};

ProcessIdentity this_process();

}  // namespace ferry

#endif  // FERRY_CORE_PROCESS_IDENTITY_HPP
