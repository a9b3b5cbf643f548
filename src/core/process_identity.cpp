#include "core/process_identity.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <charconv>
#include <fstream>
#include <sstream>
#include <string>

namespace ferry {
namespace {

/// Field 22 of /proc/self/stat (proc(5)), counted after the parenthesised name, which may contain spaces.
std::uint64_t read_start_time() {
  std::ifstream file("/proc/self/stat");
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return 0;
  std::istringstream rest(text.substr(name_end + 1));
  constexpr int kFieldAfterName = 3;
  constexpr int kStartTimeField = 22;
  std::string field;
  for (int i = kFieldAfterName; i <= kStartTimeField; ++i) rest >> field;
  std::uint64_t ticks = 0;  // from_chars instead of `>>`: see number_in() in net/nearest.cpp
  std::from_chars(field.data(), field.data() + field.size(), ticks);
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
