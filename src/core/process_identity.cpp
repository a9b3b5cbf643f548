#include "core/process_identity.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <string>
#include <string_view>

namespace ferry {

/// Counts fields after the parenthesised name, which may contain spaces.
ProcessStat read_process_stat(std::int64_t pid) {
  const std::string path = pid == 0 ? "/proc/self/stat" : "/proc/" + std::to_string(pid) + "/stat";
  std::array<char, 1024> bytes{};  // the line has at most some 400
  const std::string_view text(bytes.data(), read_beginning(path.c_str(), bytes));
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string_view::npos || name_end + 2 >= text.size()) return {};
  ProcessStat seen;
  seen.state = text[name_end + 2];
  constexpr int kFieldBeforeName = 2;
  constexpr int kStartTimeField = 22;
  std::size_t begin = name_end;
  for (int i = kFieldBeforeName; i < kStartTimeField; ++i) {
    begin = text.find(' ', begin + 1);
    if (begin == std::string_view::npos) return seen;
  }
  std::from_chars(text.data() + begin + 1, text.data() + text.size(), seen.start_time_ticks);
  return seen;
}

ProcessIdentity this_process() {
  ProcessIdentity identity;
  identity.boot_id = read_boot_id();
  struct stat info {};
  if (stat("/proc/self/ns/pid", &info) == 0) identity.pid_namespace = info.st_ino;
  identity.start_time_ticks = read_process_stat(0).start_time_ticks;
  identity.pid = getpid();
  return identity;
}

}  // namespace ferry
