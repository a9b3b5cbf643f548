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

/// Fields of /proc/PID/stat (proc(5)).
struct ProcessStat {
  char state = 0;  ///< 'R' runs, 'S' and 'D' sleep, 'T' and 't' are stopped, 'Z' and 'X' have ended; 0: no process
  std::uint64_t start_time_ticks = 0;
};

/// `pid`: in this process's namespace of process ids; 0: this process.
ProcessStat read_process_stat(std::int64_t pid);

}  // namespace ferry

#endif  // FERRY_CORE_PROCESS_IDENTITY_HPP
