#include "core/process_identity.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <string_view>

namespace ferry {
namespace {

/// Field 22 of /proc/self/stat (proc(5)), counted after the parenthesised name, which may contain spaces.
std::uint64_t read_start_time() {
  std::array<char, 1024> bytes{};  // the line has at most some 400
  const std::string_view text(bytes.data(), read_beginning("/proc/self/stat", bytes));
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string_view::npos) return 0;
  constexpr int kFieldBeforeName = 2;
  constexpr int kStartTimeField = 22;
  std::size_t begin = name_end;
  for (int i = kFieldBeforeName; i < kStartTimeField; ++i) {
    begin = text.find(' ', begin + 1);
    if (begin == std::string_view::npos) return 0;
  }
  std::uint64_t ticks = 0;
  std::from_chars(text.data() + begin + 1, text.data() + text.size(), ticks);
  return ticks;
}

}  // namespace

ProcessIdentity this_process() {
  ProcessIdentity identity;
  identity.boot_id = read_boot_id();
  struct stat info {};
  if (stat("/proc/self/ns/pid", &info) == 0) identity.pid_namespace = info.st_ino;
  identity.start_time_ticks = read_start_time();
  identity.pid = getpid();
  return identity;
}

}  // namespace ferry
