#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>

#include "doctor/finding.hpp"
#include "ferry/backends.hpp"
#include "ferry/bootstrap.hpp"
#include "report/host_facts.hpp"
#include "report/table.hpp"

namespace ferry::tools {

namespace {

/// Ranks that the demo starts; each CPU rank holds a few descriptors for every peer.
constexpr int kUsualNumRanks = 8;
constexpr rlim_t kDescriptorsPerPeer = 4;
constexpr rlim_t kDescriptorsAside = 64;
/// Memory that suffices for the default demo with all its rank processes.
constexpr std::int64_t kComfortableMemoryBytes = std::int64_t{2} << 30;
/// Eight ranks of two nodes share memory if they have 48 MiB in all, but not if they have 32 MiB (UCX 1.13).
constexpr std::uint64_t kComfortableShmBytes = std::uint64_t{64} << 20;

Finding examine_cpu(const HostFacts& facts) {
  Finding finding{Health::kOk, "cpu", fmt::format("{}, {} usable CPUs", facts.cpu_model, facts.num_cpus), ""};
  if (facts.num_cpus < kUsualNumRanks) {
    finding.advice = fmt::format("more ranks than {} take turns; waiting ranks sleep, so this works", facts.num_cpus);
  }
  return finding;
}

Finding examine_simd(const HostFacts& facts) {
  if (facts.simd == "sse2" || facts.simd == "avx" || facts.simd == "unknown") {
    return {Health::kWarn, "simd", facts.simd, "combine runs its portable code: correct, slower than with avx2"};
  }
  return {Health::kOk, "simd", facts.simd, ""};
}

Finding examine_memory(const HostFacts& facts) {
  const std::int64_t limit = facts.memory_limit_bytes;
  const std::int64_t usable = limit > 0 ? std::min(limit, facts.available_memory_bytes) : facts.available_memory_bytes;
  Finding finding{
      Health::kOk, "memory",
      fmt::format("{} of {} available, {}", format_bytes(static_cast<double>(facts.available_memory_bytes)),
                  format_bytes(static_cast<double>(facts.memory_bytes)),
                  limit > 0 ? fmt::format("control group limit {}", format_bytes(static_cast<double>(limit)))
                            : std::string("no control group limit")),
      ""};
  if (usable < kComfortableMemoryBytes) {
    finding.health = Health::kWarn;
    finding.advice = "use fewer ranks or tokens (--ranks, --tokens) than the defaults";
  }
  return finding;
}

/// Examines the shared memory of ranks of several nodes on one host; ranks of one node need none of it.
Finding examine_shared_memory() {
  constexpr const char* kFolder = "/dev/shm";
  constexpr const char* kAdvice =
      "several nodes on this host may not work, or only over loopback TCP, which is slower; docker run --shm-size=1g, "
      "or "
      "mount -o remount,size=1G /dev/shm";
  struct statvfs info {};
  if (statvfs(kFolder, &info) != 0) return {Health::kWarn, kFolder, std::strerror(errno), kAdvice};
  const std::uint64_t free_bytes = std::uint64_t{info.f_bavail} * info.f_frsize;
  const std::uint64_t size_bytes = std::uint64_t{info.f_blocks} * info.f_frsize;
  const bool writable = (info.f_flag & ST_RDONLY) == 0 && access(kFolder, W_OK | X_OK) == 0;
  const bool good = writable && free_bytes >= kComfortableShmBytes;
  return {good ? Health::kOk : Health::kWarn, kFolder,
          fmt::format("{} of {} free{}", format_bytes(static_cast<double>(free_bytes)),
                      format_bytes(static_cast<double>(size_bytes)), writable ? "" : ", not writable"),
          good ? "" : kAdvice};
}

Finding examine_descriptors() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const bool unlimited = limit.rlim_cur == RLIM_INFINITY;
  Finding finding{Health::kOk, "open files", unlimited ? "no limit" : fmt::format("limit {}", limit.rlim_cur), ""};
  if (unlimited) return finding;
  if (limit.rlim_cur < kUsualNumRanks * kDescriptorsPerPeer + kDescriptorsAside) {
    finding.health = Health::kWarn;
    finding.advice = "raise it: ulimit -n 1024";
    return finding;
  }
  finding.observed += fmt::format(", enough for {} ranks", (limit.rlim_cur - kDescriptorsAside) / kDescriptorsPerPeer);
  return finding;
}

}  // namespace

std::vector<Finding> examine_host() {
  const HostFacts facts = read_host_facts();
  return {examine_cpu(facts), examine_simd(facts), examine_memory(facts), examine_shared_memory(),
          examine_descriptors()};
}

std::vector<Finding> examine_launchers() {
  std::vector<Finding> findings;
  for (const LauncherVariables& seen : launcher_variables_from_environment()) {
    findings.push_back({Health::kOk, "launcher",
                        fmt::format("{}: {}={}, {}={}", seen.launcher, seen.rank.name, seen.rank.value,
                                    seen.num_ranks.name, seen.num_ranks.value),
                        seen.num_ranks.value == "1"
                            ? ""
                            : "demo and bench treat this process as one rank, unless --launch fork is given"});
  }
  if (findings.empty()) {
    findings.push_back({Health::kOk, "launcher", "none: demo and bench fork their ranks", ""});
  }
  return findings;
}

std::vector<Finding> examine_backends() {
  std::vector<Finding> findings;
  bool has_cuda = false;
  for (const BackendInfo& backend : backends()) {
    has_cuda = has_cuda || backend.name == "cuda";
    findings.push_back({backend.available ? Health::kOk : Health::kMissing, fmt::format("backend {}", backend.name),
                        backend.description, backend.reason});
  }
  std::error_code ignored;
  const bool has_gpu = std::filesystem::exists("/dev/nvidia0", ignored) ||
                       std::filesystem::exists("/proc/driver/nvidia/version", ignored);
  if (!has_cuda) {
    findings.push_back(
        {Health::kMissing, "backend cuda",
         fmt::format("not in this build; {}", has_gpu ? "there are NVIDIA GPUs here" : "no NVIDIA GPU seen"),
         "ranks run on the CPU"});
  }
  return findings;
}

}  // namespace ferry::tools
