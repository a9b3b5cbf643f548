#include "core/host_identity.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <string>

namespace ferry {

BootId read_boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string text;
  file >> text;
  BootId boot_id{};
  std::copy_n(text.begin(), std::min(text.size(), boot_id.size()), boot_id.begin());
  return boot_id;
}

HostIdentity this_host() {
  HostIdentity identity;
  identity.boot_id = read_boot_id();
  struct stat info {};
  // The namespace of the thread, not of the process: a thread can leave its process's network namespace, together with
  // its sockets.
  if (stat("/proc/thread-self/ns/net", &info) == 0) identity.network_namespace = info.st_ino;
  if (stat("/dev/shm", &info) == 0) {
    identity.shm_device = info.st_dev;
    identity.shm_inode = info.st_ino;
  }
  return identity;
}

}  // namespace ferry
