#include "common/read_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace ferry::tools {

Result<std::string> read_file(const std::string& path, std::string_view what, std::size_t max_bytes) {
  constexpr std::size_t kStepBytes = std::size_t{1} << 16;
  std::string bytes;
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY);
  int error = fd < 0 ? errno : 0;
  while (error == 0 && bytes.size() < max_bytes) {
    const std::size_t before = bytes.size();
    const std::size_t step = std::min(kStepBytes, max_bytes - before);
    bytes.resize(before + step);
    const ssize_t num_read = ::read(fd, bytes.data() + before, step);
    if (num_read < 0 && errno != EINTR) error = errno;
    bytes.resize(before + static_cast<std::size_t>(std::max<ssize_t>(num_read, 0)));
    if (num_read == 0) break;
  }
  if (fd >= 0) ::close(fd);
  if (error == 0) return bytes;
  return Status(ErrorCode::kSystem, fmt::format("cannot read {} {}: {}; name a file that exists and can be read", what,
                                                path, std::strerror(error)));
}

}  // namespace ferry::tools
