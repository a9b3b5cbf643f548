#include "net/numa.hpp"

#include <fmt/format.h>
#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <string>

#include "net/sysfs.hpp"

namespace ferry::net {
namespace {

/// A thread that polls leaves the others of its node at least one processor.
constexpr std::size_t kLeastCpus = 2;

constexpr std::size_t kMaskBits = std::numeric_limits<unsigned long>::digits;
/// Linux numbers at most 1024 NUMA nodes (CONFIG_NODES_SHIFT). The kernel ignores the last bit of a mask.
constexpr int kMaxNodes = 1023;
using NodeMask = std::array<unsigned long, (kMaxNodes + kMaskBits) / kMaskBits>;
constexpr unsigned long kNodeMaskBits = kMaxNodes + 1;

std::optional<int> cpu_number(std::string_view text) {
  int number = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  if (number < 0 || number >= CPU_SETSIZE) return std::nullopt;
  return number;
}

}  // namespace

Result<bool> follows_numa() {
  const char* const variable = std::getenv(kNumaVariable);
  const std::string_view text = variable == nullptr ? "" : variable;
  if (text.empty() || text == "auto") return true;
  if (text == "off") return false;
  return Status(
      ErrorCode::kInvalidArgument,
      fmt::format("Group::create: the variable {} is \"{}\", expected \"auto\" or \"off\"", kNumaVariable, text));
}

int numa_node_of(std::string_view pci_address, const std::filesystem::path& sys) {
  return pci_address.empty() ? -1 : number_in(pci_device(pci_address, sys) / "numa_node");
}

std::optional<std::vector<int>> parse_cpu_list(std::string_view list) {
  std::vector<int> cpus;
  if (list.empty()) return cpus;  // a node of memory alone
  for (std::size_t begin = 0; begin <= list.size();) {
    const std::size_t end = std::min(list.find(',', begin), list.size());
    const std::string_view range = list.substr(begin, end - begin);
    const std::size_t dash = std::min(range.find('-'), range.size());
    const std::optional<int> first = cpu_number(range.substr(0, dash));
    const std::optional<int> last = dash == range.size() ? first : cpu_number(range.substr(dash + 1));
    if (!first || !last || *first > *last) return std::nullopt;
    for (int cpu = *first; cpu <= *last; ++cpu) cpus.push_back(cpu);
    begin = end + 1;
  }
  return cpus;
}

std::vector<int> cpus_of_node(int numa_node, std::span<const int> allowed, const std::filesystem::path& sys) {
  if (numa_node < 0) return {};
  const std::optional<std::vector<int>> of_node =
      parse_cpu_list(first_line(sys / "devices/system/node" / fmt::format("node{}", numa_node) / "cpulist"));
  if (!of_node) return {};
  std::vector<int> cpus;
  std::ranges::copy_if(allowed, std::back_inserter(cpus),
                       [&](int cpu) { return std::ranges::find(*of_node, cpu) != of_node->end(); });
  return cpus.size() < kLeastCpus ? std::vector<int>() : cpus;
}

std::vector<int> allowed_cpus() {
  cpu_set_t set;
  std::vector<int> cpus;
  // The call fails if the machine has more processors than fit in the set.
  if (sched_getaffinity(0, sizeof set, &set) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(static_cast<std::size_t>(cpu), &set)) cpus.push_back(cpu);
  }
  return cpus;
}

void run_on(std::span<const int> cpus) {
  if (cpus.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) {
    if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(static_cast<std::size_t>(cpu), &set);
  }
  static_cast<void>(sched_setaffinity(0, sizeof set, &set));
}

PreferNode::PreferNode(int numa_node) {
  if (numa_node < 0 || numa_node >= kMaxNodes) return;
  int policy = MPOL_DEFAULT;
  if (syscall(SYS_get_mempolicy, &policy, nullptr, 0UL, nullptr, 0UL) != 0 || policy != MPOL_DEFAULT) return;
  NodeMask mask{};
  const auto node = static_cast<std::size_t>(numa_node);
  mask[node / kMaskBits] = 1UL << (node % kMaskBits);
  is_set_ = syscall(SYS_set_mempolicy, MPOL_PREFERRED, mask.data(), kNodeMaskBits) == 0;
}

PreferNode::~PreferNode() {
  if (is_set_) static_cast<void>(syscall(SYS_set_mempolicy, MPOL_DEFAULT, nullptr, 0UL));
}

}  // namespace ferry::net
