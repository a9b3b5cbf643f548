#include "net/ucx/limits.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

namespace ferry::net::ucx {
namespace {

constexpr const char* kSharedMemoryFolder = "/dev/shm";

/// Closes what it holds.
class Descriptors {
 public:
  Descriptors() = default;
  Descriptors(const Descriptors&) = delete;
  Descriptors& operator=(const Descriptors&) = delete;
  ~Descriptors() {
    for (const int fd : held_) (void)close(fd);
  }

  /// False with errno where the system refuses.
  bool open_another() {
    const int fd = held_.empty() ? eventfd(0, EFD_CLOEXEC) : fcntl(held_.front(), F_DUPFD_CLOEXEC, 0);
    if (fd >= 0) held_.push_back(fd);
    return fd >= 0;
  }
  std::size_t size() const { return held_.size(); }

 private:
  std::vector<int> held_;
};

std::string mib(std::size_t num_bytes) { return fmt::format("{:.1f} MiB", static_cast<double>(num_bytes) / (1 << 20)); }

Status no_shared_memory(std::string_view what, std::string_view remedy) {
  return Status(ErrorCode::kSystem,
                fmt::format("network engine ucx: {}; {}, or take posix out of UCX_TLS", what, remedy));
}

}  // namespace

Status check_descriptors(std::size_t num_needed) {
  Descriptors descriptors;
  while (descriptors.size() < num_needed) {
    if (descriptors.open_another()) continue;
    const int error = errno;
    rlimit limit{};
    (void)getrlimit(RLIMIT_NOFILE, &limit);
    return Status(ErrorCode::kSystem,
                  fmt::format("network engine ucx: {} more file descriptors can be opened, {} are needed ({}; this "
                              "process may have {}); raise the limit (ulimit -n) or close some",
                              descriptors.size(), num_needed, std::strerror(error), limit.rlim_cur));
  }
  return {};
}

std::string shared_memory_folder() {
  const char* folder = std::getenv("UCX_POSIX_DIR");
  return folder != nullptr ? folder : kSharedMemoryFolder;
}

Status check_shared_memory(std::size_t bytes_needed) {
  const std::string folder = shared_memory_folder();
  struct statvfs facts {};
  if (statvfs(folder.c_str(), &facts) != 0) {
    return no_shared_memory(fmt::format("{}, for shared memory, cannot be examined: {}", folder, std::strerror(errno)),
                            "mount a tmpfs there");
  }
  const std::size_t size = facts.f_blocks * facts.f_frsize;
  const std::size_t left = facts.f_bavail * facts.f_frsize;
  if (left < bytes_needed) {
    return no_shared_memory(fmt::format("{}, for shared memory, has {}, of which {} are left, and this rank needs {}",
                                        folder, mib(size), mib(left), mib(bytes_needed)),
                            "give it more (docker run --shm-size, mount -o remount,size=)");
  }
  if (access(folder.c_str(), W_OK) != 0) {
    return no_shared_memory(
        fmt::format("{}, for shared memory, has {} but cannot be written to: {}, and this rank needs {}", folder,
                    mib(size), std::strerror(errno), mib(bytes_needed)),
        "make it writable");
  }
  return {};
}

}  // namespace ferry::net::ucx
