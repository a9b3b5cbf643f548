#include "report/host_facts.hpp"

#include <fmt/format.h>
#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string_view>

namespace ferry::tools {

namespace {

/// Text after "key<blanks>:<blank>" on the first such line of a file of /proc; empty if there is none.
std::string proc_field(const char* path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, key.size(), key) != 0) continue;
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const std::size_t start = line.find_first_not_of(" \t", colon + 1);
    return start == std::string::npos ? "" : line.substr(start);
  }
  return "";
}

std::int64_t meminfo_bytes(std::string_view key) {
  std::int64_t kibibytes = 0;
  std::istringstream(proc_field("/proc/meminfo", key)) >> kibibytes;
  return kibibytes * 1024;
}

std::int64_t read_number(const std::string& path) {
  std::int64_t value = 0;
  std::ifstream(path) >> value;  // "max" leaves 0: no limit
  return value;
}

/// Smallest memory limit on the path from this process's control group (version 2, else version 1) to the root.
std::int64_t control_group_limit(std::int64_t memory_bytes) {
  std::ifstream groups("/proc/self/cgroup");
  std::int64_t limit = 0;
  const auto take = [&](std::int64_t candidate) {
    // Version 1 writes "no limit" as a number near 2^63, which exceeds the memory of any machine.
    if (candidate > 0 && candidate < memory_bytes) limit = limit == 0 ? candidate : std::min(limit, candidate);
  };
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool unified = controllers.empty();
    if (!unified && controllers.find("memory") == std::string::npos) continue;
    const std::string base = unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    const char* file = unified ? "/memory.max" : "/memory.limit_in_bytes";
    std::string path = line.substr(second + 1);
    while (true) {
      take(read_number(base + path + file));
      if (path.empty() || path == "/") break;
      path.resize(path.rfind('/'));
    }
  }
  return limit;
}

std::string simd_level() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return "avx512";
  if (__builtin_cpu_supports("avx2")) return "avx2";
  if (__builtin_cpu_supports("avx")) return "avx";
  return "sse2";
#elif defined(__aarch64__)
  return "neon";
#else
  return "unknown";
#endif
}

int usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
}

}  // namespace

HostFacts read_host_facts() {
  HostFacts facts;
  utsname names{};
  uname(&names);
  facts.host_name = names.nodename;
  facts.kernel = fmt::format("{} {} {}", names.sysname, names.release, names.machine);
  facts.cpu_model = proc_field("/proc/cpuinfo", "model name");
  if (facts.cpu_model.empty()) facts.cpu_model = names.machine;
  facts.simd = simd_level();
  facts.num_cpus = usable_cpus();
  facts.memory_bytes = meminfo_bytes("MemTotal");
  facts.available_memory_bytes = meminfo_bytes("MemAvailable");
  facts.memory_limit_bytes = control_group_limit(facts.memory_bytes);
  return facts;
}

std::string read_driver_module_version() {
  // "NVRM version: NVIDIA UNIX … Kernel Module  580.65.06  Release Build …"
  std::ifstream file("/proc/driver/nvidia/version");
  std::string word;
  while (file >> word) {
    const bool is_version = !word.empty() && word.find_first_not_of("0123456789.") == std::string::npos &&
                            word.find('.') != std::string::npos;
    if (is_version) return word;
  }
  return "";
}

std::string describe(const HostFacts& facts) {
  return fmt::format("{}: {}, {} CPUs", facts.host_name, facts.cpu_model, facts.num_cpus);
}

Json to_json(const HostFacts& facts) {
  return {{"host_name", facts.host_name},
          {"cpu_model", facts.cpu_model},
          {"simd", facts.simd},
          {"num_cpus", facts.num_cpus},
          {"memory_bytes", facts.memory_bytes},
          {"available_memory_bytes", facts.available_memory_bytes},
          {"memory_limit_bytes", facts.memory_limit_bytes},
          {"kernel", facts.kernel}};
}

}  // namespace ferry::tools
