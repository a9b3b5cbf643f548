#include "core/descriptors.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/eventfd.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstring>

namespace ferry {

bool is_out_of_descriptors(int error) { return error == EMFILE || error == ENFILE || error == ETOOMANYREFS; }

std::string describe_descriptor_limit(int error, std::int64_t num_missing) {
  if (error == ENFILE) {
    return "file descriptors: this machine has no more; close some programs, or raise its limit (sysctl fs.file-max)";
  }
  rlimit limit{};
  (void)getrlimit(RLIMIT_NOFILE, &limit);
  return fmt::format("file descriptors: limit {}, needs about {}; raise it (ulimit -n)", limit.rlim_cur,
                     static_cast<std::int64_t>(limit.rlim_cur) + num_missing);
}

Result<std::vector<UniqueFd>> reserve_descriptors(std::int64_t count, std::string_view what) {
  std::vector<UniqueFd> reserved;
  while (static_cast<std::int64_t>(reserved.size()) < count) {
    // All but the first are duplicates, which cost the kernel only their numbers.
    UniqueFd fd(reserved.empty() ? eventfd(0, EFD_CLOEXEC) : fcntl(reserved.front().get(), F_DUPFD_CLOEXEC, 0));
    if (!fd.valid()) {
      const int error = errno;
      const std::int64_t num_missing = count - static_cast<std::int64_t>(reserved.size());
      reserved.clear();
      return Status(ErrorCode::kSystem,
                    fmt::format("{}: {}", what,
                                is_out_of_descriptors(error) ? describe_descriptor_limit(error, num_missing)
                                                             : std::string(std::strerror(error))));
    }
    reserved.push_back(std::move(fd));
  }
  return reserved;
}

}  // namespace ferry
