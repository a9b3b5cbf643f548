#include "net/ucx/limits.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string_view>

#include "net/threads.hpp"

namespace ferry::net::ucx {
namespace {

constexpr const char* kSharedMemoryFolder = "/dev/shm";

/// Number of file descriptors that this process may still open, capped at `at_most`. Opens none, not even for a moment:
/// UCX's own thread stops listening for good if it finds none free.
std::size_t num_free_descriptors(std::size_t at_most, rlim_t limit) {
  std::size_t num_free = 0;
  for (rlim_t fd = 0; fd < limit && num_free < at_most; ++fd) {
    if (fcntl(static_cast<int>(fd), F_GETFD) < 0) ++num_free;
  }
  return num_free;
}

/// Reservations of all ends of this process. Descriptors that an end has opened already are counted twice, which is
/// safe.
struct Reservations {
  std::mutex mutex;
  std::size_t num_reserved = 0;
};

Reservations& reservations() {
  static Reservations all;
  return all;
}

Status check_beside(std::size_t num_needed, std::size_t num_reserved) {
  rlimit limit{};
  (void)getrlimit(RLIMIT_NOFILE, &limit);
  const std::size_t num_free = num_free_descriptors(num_needed + num_reserved, limit.rlim_cur);
  if (num_free == num_needed + num_reserved) return {};
  const std::string others =
      num_reserved == 0 ? "" : fmt::format(" and {} by ranks of this process that connect now", num_reserved);
  return Status(ErrorCode::kSystem,
                fmt::format("network engine ucx: {} more file descriptors can be opened, {} are needed{} (this process "
                            "may have {}); raise the limit (ulimit -n) or close some",
                            num_free, num_needed, others, limit.rlim_cur));
}

std::string mib(std::size_t num_bytes) { return fmt::format("{:.1f} MiB", static_cast<double>(num_bytes) / (1 << 20)); }

Status no_shared_memory(std::string_view what, std::string_view remedy) {
  return Status(ErrorCode::kSystem,
                fmt::format("network engine ucx: {}; {}, or take posix out of UCX_TLS", what, remedy));
}

}  // namespace

Status check_descriptors(std::size_t num_needed) {
  Reservations& all = reservations();
  const std::lock_guard lock(all.mutex);
  return check_beside(num_needed, all.num_reserved);
}

Status ReservedDescriptors::reserve(std::size_t num_needed) {
  Reservations& all = reservations();
  const std::lock_guard lock(all.mutex);
  if (Status status = check_beside(num_needed, all.num_reserved); !status.ok()) return status;
  all.num_reserved += num_needed;
  num_reserved_ = num_needed;
  return {};
}

void ReservedDescriptors::give_back() {
  if (num_reserved_ == 0) return;
  Reservations& all = reservations();
  const std::lock_guard lock(all.mutex);
  all.num_reserved -= num_reserved_;
  num_reserved_ = 0;
}

Status check_threads() {
  ReservedThreads threads;
  const Status status = threads.reserve(1);
  return status.ok() ? status : Status(status.code(), fmt::format("network engine ucx: {}", status.message()));
}

Status check_address_space(std::size_t num_bytes) {
  void* const room = mmap(nullptr, num_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room != MAP_FAILED) {
    (void)munmap(room, num_bytes);
    return {};
  }
  const std::string why = std::strerror(errno);
  rlimit limit{};
  (void)getrlimit(RLIMIT_AS, &limit);
  const std::string allowed = limit.rlim_cur == RLIM_INFINITY ? "no limit" : "a limit of " + mib(limit.rlim_cur);
  return Status(ErrorCode::kSystem,
                fmt::format("network engine ucx: {} more address space are needed ({}; this process has {}); raise the "
                            "limit (ulimit -v)",
                            mib(num_bytes), why, allowed));
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
