#ifndef FERRY_NET_NUMA_HPP
#define FERRY_NET_NUMA_HPP

/// Memory and processors of the NUMA node of a device, so that what a GPU, a network card and the thread between them
/// share is near all three.

#include <filesystem>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "ferry/status.hpp"

namespace ferry::net {

/// Variable that turns the choices of this file off.
inline constexpr const char* kNumaVariable = "FERRY_NUMA";

/// Value of that variable: "auto", which is the default, or "off".
/// @errors kInvalidArgument: it has another value
Result<bool> follows_numa();

/// NUMA node of the PCI device at `pci_address` ("0000:1b:00.0"); -1: not known.
int numa_node_of(std::string_view pci_address, const std::filesystem::path& sys = "/sys");

/// Numbers of a list as the kernel writes it, "0-3,8,10-11", in its order. Null if it is malformed or has a number that
/// no processor has.
std::optional<std::vector<int>> parse_cpu_list(std::string_view list);

/// Processors of a NUMA node among those `allowed`. Empty if there are fewer than two, or if the system does not tell:
/// a thread that polls would keep a single one from all others that are bound to it.
std::vector<int> cpus_of_node(int numa_node, std::span<const int> allowed, const std::filesystem::path& sys = "/sys");

/// Processors that the calling thread may run on; empty: not known.
std::vector<int> allowed_cpus();

/// Binds the calling thread to processors; none: it stays as it is. Has no effect where that is not permitted.
void run_on(std::span<const int> cpus);

/// While it lives, new memory of the calling thread comes from a NUMA node as long as that has some. Has no effect if
/// the node is not known (-1), if the program has set a policy of its own, or where that is not permitted, as in some
/// containers.
class PreferNode {
 public:
  explicit PreferNode(int numa_node);
  ~PreferNode();
  PreferNode(const PreferNode&) = delete;
  PreferNode& operator=(const PreferNode&) = delete;

 private:
  bool is_set_ = false;
};

}  // namespace ferry::net

#endif  // FERRY_NET_NUMA_HPP
