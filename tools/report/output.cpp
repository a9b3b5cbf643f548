#include "report/output.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

namespace ferry::tools {

namespace {

namespace fs = std::filesystem;

/// Number of symbolic links that the kernel follows (path_resolution(7)).
constexpr int kMaxLinks = 40;
/// Permissions of a new file, from which the user's umask removes some.
constexpr mode_t kNewFileMode = 0666;

Status cannot_write(const std::string& path, std::string_view what, int error) {
  const std::string where = path == "-" ? "to standard output" : path;
  const std::string_view advice = error == ENOSPC || error == EDQUOT ? "free some room there, or name another file"
                                  : path == "-"                      ? "see where standard output goes"
                                                : "name a file in a folder that exists and can be written";
  return {ErrorCode::kSystem, fmt::format("cannot write {} {}: {}; {}", what, where, std::strerror(error), advice)};
}

/// Owner of an open file. `close` reports delayed errors, such as those of network file systems.
class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  File(const File&) = delete;
  ~File() { (void)close(); }
  int fd() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  /// 0 or an errno value.
  int close() {
    const int fd = std::exchange(fd_, -1);
    return fd >= 0 && ::close(fd) != 0 && errno != EINTR ? errno : 0;
  }

 private:
  int fd_;
};

/// 0 or an errno value.
int write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t num_bytes = ::write(fd, text.data(), text.size());
    if (num_bytes < 0 && errno == EINTR) continue;
    if (num_bytes < 0) return errno;
    text.remove_prefix(static_cast<std::size_t>(num_bytes));
  }
  return 0;
}

/// Target of a path.
struct Target {
  enum class Kind { kNew, kRegular, kOther, kDescriptor };
  Kind kind = Kind::kNew;
  fs::path path;          ///< after all symbolic links
  int descriptor = -1;    ///< kDescriptor
  struct stat status {};  ///< kRegular, kOther
};

/// Number in /dev/fd/N, /proc/self/fd/N and links to them, such as /dev/stdout; -1 for other paths. Opening such a path
/// would fail for sockets, and truncate a regular file.
int descriptor_of(const fs::path& path) {
  std::error_code error;
  const fs::path folder = fs::canonical(path.parent_path().empty() ? fs::path(".") : path.parent_path(), error);
  if (error || (folder != fmt::format("/proc/{}/fd", ::getpid()))) return -1;
  const std::string digits = path.filename().string();
  int number = -1;
  const auto [end, failed] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  return failed == std::errc() && end == digits.data() + digits.size() ? number : -1;
}

/// 0 or an errno value.
int find_target(const std::string& path, Target* target) {
  target->path = path;
  for (int i = 0; i < kMaxLinks; ++i) {
    target->descriptor = descriptor_of(target->path);
    if (target->descriptor >= 0) {
      target->kind = Target::Kind::kDescriptor;
      return ::fcntl(target->descriptor, F_GETFD) >= 0 ? 0 : errno;
    }
    if (::lstat(target->path.c_str(), &target->status) != 0) {
      target->kind = Target::Kind::kNew;
      return errno == ENOENT ? 0 : errno;
    }
    if (!S_ISLNK(target->status.st_mode)) {
      if (S_ISDIR(target->status.st_mode)) return EISDIR;
      target->kind = S_ISREG(target->status.st_mode) ? Target::Kind::kRegular : Target::Kind::kOther;
      return 0;
    }
    std::error_code error;
    const fs::path link = fs::read_symlink(target->path, error);
    if (error) return error.value();
    target->path = target->path.parent_path() / link;  // an absolute link replaces the folder
  }
  return ELOOP;
}

/// Path of a new file next to the target.
fs::path partial_path(const Target& target) {
  return target.path.parent_path() / fmt::format("{}.{}.part", target.path.filename().string(), ::getpid());
}

File create_new(const fs::path& path) {
  return File(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, kNewFileMode));
}

/// True if a new file can replace the target without any change but its content.
bool takes_place_of(const Target& target, const File& partial) {
  if (target.kind == Target::Kind::kNew) return true;
  struct stat fresh {};
  if (target.status.st_nlink > 1 || ::fstat(partial.fd(), &fresh) != 0) return false;
  const bool same_owner = (fresh.st_uid == target.status.st_uid && fresh.st_gid == target.status.st_gid) ||
                          ::fchown(partial.fd(), target.status.st_uid, target.status.st_gid) == 0;
  return same_owner && ::fchmod(partial.fd(), target.status.st_mode & 07777U) == 0;
}

/// 0 or an errno value.
int write_in_place(const Target& target, std::string_view text) {
  File file(::open(target.path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, kNewFileMode));
  if (!file.is_open()) return errno;
  const int error = write_all(file.fd(), text);
  const int close_error = file.close();
  return error != 0 ? error : close_error;
}

/// 0 or an errno value.
int write_file(const Target& target, std::string_view text) {
  if (target.kind == Target::Kind::kRegular && ::faccessat(AT_FDCWD, target.path.c_str(), W_OK, AT_EACCESS) != 0) {
    return errno;
  }
  const fs::path path = partial_path(target);
  File partial = create_new(path);
  if (!partial.is_open()) return write_in_place(target, text);
  if (!takes_place_of(target, partial)) {
    ::unlink(path.c_str());
    return write_in_place(target, text);
  }
  int error = write_all(partial.fd(), text);
  if (const int close_error = partial.close(); error == 0) error = close_error;
  if (error == 0 && ::rename(path.c_str(), target.path.c_str()) == 0) return 0;
  ::unlink(path.c_str());
  // A file that cannot be replaced by a rename, such as a mount point, can still be written.
  return error != 0 ? error : write_in_place(target, text);
}

/// 0 or an errno value.
int write_target(const Target& target, std::string_view text) {
  switch (target.kind) {
    case Target::Kind::kDescriptor:
      std::fflush(stdout);  // earlier output first, in case it goes to the same file
      return write_all(target.descriptor, text);
    case Target::Kind::kOther: {
      File file(::open(target.path.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY));
      if (!file.is_open()) return errno;
      const int error = write_all(file.fd(), text);
      const int close_error = file.close();
      return error != 0 ? error : close_error;
    }
    case Target::Kind::kNew:
    case Target::Kind::kRegular:
      return write_file(target, text);
  }
  return EINVAL;
}

/// 0 or an errno value.
int check_target(const Target& target) {
  switch (target.kind) {
    case Target::Kind::kDescriptor:
      return (::fcntl(target.descriptor, F_GETFL) & O_ACCMODE) == O_RDONLY ? EBADF : 0;
    case Target::Kind::kOther:
      // Opening and closing a pipe would end its reader.
      return ::faccessat(AT_FDCWD, target.path.c_str(), W_OK, AT_EACCESS) == 0 ? 0 : errno;
    case Target::Kind::kRegular: {
      const File file(::open(target.path.c_str(), O_WRONLY | O_CLOEXEC));
      return file.is_open() ? 0 : errno;
    }
    case Target::Kind::kNew: {
      const File file = create_new(target.path);
      if (!file.is_open()) return errno;
      ::unlink(target.path.c_str());
      return 0;
    }
  }
  return EINVAL;
}

}  // namespace

Status write_text(const std::string& path, std::string_view text, std::string_view what) {
  if (path == "-") return print(stdout, text);
  Target target;
  int error = find_target(path, &target);
  if (error == 0) error = write_target(target, text);
  return error == 0 ? Status() : cannot_write(path, what, error);
}

Status check_writable(const std::string& path, std::string_view what) {
  if (path.empty() || path == "-") return {};
  Target target;
  int error = find_target(path, &target);
  if (error == 0) error = check_target(target);
  return error == 0 ? Status() : cannot_write(path, what, error);
}

std::FILE* text_stream(const std::string& path) { return path == "-" ? stderr : stdout; }

Status print(std::FILE* stream, std::string_view text) {
  const bool failed_before = std::ferror(stream) != 0;
  errno = 0;
  const bool written = std::fwrite(text.data(), 1, text.size(), stream) == text.size() && std::fflush(stream) == 0;
  if (stream != stdout || (written && !failed_before)) return {};
  return cannot_write("-", "what this command prints", errno == 0 ? EIO : errno);
}

void print_error(std::string_view text) { (void)print(stderr, text); }

void hold_standard_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(stream, F_GETFD) >= 0) continue;
    // The lowest free number is this stream's. Open it for reading only, so that writes to it fail as before.
    const int fd = ::open("/dev/null", stream == STDERR_FILENO ? O_WRONLY : O_RDONLY);
    if (fd >= 0 && fd != stream) ::close(fd);
  }
}

}  // namespace ferry::tools
