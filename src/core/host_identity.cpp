#include "core/host_identity.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "core/descriptors.hpp"
#include "core/unique_fd.hpp"

namespace ferry {

std::size_t read_beginning(const char* path, std::span<char> into) {
  const UniqueFd file(open(path, O_RDONLY | O_CLOEXEC));
  if (!file.valid() && is_out_of_descriptors(errno)) {
    const int error = errno;
    throw std::system_error(error, std::generic_category(),
                            fmt::format("opening {}: {}", path, describe_descriptor_limit(error, 1)));
  }
  const ssize_t num_bytes = file.valid() ? read(file.get(), into.data(), into.size()) : 0;
  return static_cast<std::size_t>(std::max<ssize_t>(num_bytes, 0));
}

BootId read_boot_id() {
  BootId boot_id{};
  const std::size_t num_bytes = read_beginning("/proc/sys/kernel/random/boot_id", boot_id);
  // A line.
  if (num_bytes > 0 && boot_id[num_bytes - 1] == '\n') boot_id[num_bytes - 1] = 0;
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
