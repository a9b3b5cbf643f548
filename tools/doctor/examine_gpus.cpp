#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "device/device_facts.hpp"
#include "device/device_memory.hpp"
#include "doctor/finding.hpp"
#include "ferry/transports.hpp"
#include "report/host_facts.hpp"
#include "report/table.hpp"

namespace ferry::tools {

namespace {

Finding unreadable(const std::string& name, const Status& status) {
  return {Health::kWarn, name, status.to_string(), "run nvidia-smi to see whether the driver works"};
}

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

std::string describe_nearest(const DeviceFacts& facts) {
  const std::vector<std::string> ports = nearest_net_devices(facts.pci_address.data());
  return ports.empty() ? "" : fmt::format(", nearest network port {}", fmt::join(ports, " or "));
}

Finding describe_gpu(const DeviceFacts& facts) {
  const std::string driver = read_driver_module_version();
  return {Health::kOk, fmt::format("gpu {}", facts.ordinal),
          fmt::format("{}, compute capability {}.{}, {} SMs, {}, driver {}(CUDA {}), PCI {}{}", facts.name.data(),
                      facts.compute_major, facts.compute_minor, facts.num_sms,
                      format_bytes(static_cast<double>(facts.memory_bytes)), driver.empty() ? "" : driver + " ",
                      version_text(facts.driver_version), facts.pci_address.data(), describe_nearest(facts)),
          ""};
}

std::string describe_peer(const PeerFacts& facts) {
  if (!facts.has_access) return "no access";
  return fmt::format("access, performance rank {}, {} atomics", facts.performance_rank,
                     facts.has_native_atomics ? "native" : "no native");
}

/// One line if all pairs are alike, else one line per GPU.
std::vector<Finding> examine_peers(int num_devices) {
  if (num_devices < 2) return {};
  std::vector<Finding> findings;
  bool uniform = true;
  bool complete = true;
  std::string usual;
  for (int device = 0; device < num_devices; ++device) {
    Finding finding{Health::kOk, fmt::format("gpu {} peers", device), "", ""};
    for (int peer = 0; peer < num_devices; ++peer) {
      if (peer == device) continue;
      const auto facts = read_peer_facts(device, peer);
      if (!facts) return {unreadable("gpu peers", facts.status())};
      const std::string text = describe_peer(*facts);
      if (usual.empty()) usual = text;
      uniform = uniform && text == usual;
      complete = complete && facts->has_access;
      if (!facts->has_access) finding.health = Health::kWarn;
      finding.observed += fmt::format("{}{}: {}", finding.observed.empty() ? "" : "; ", peer, text);
    }
    if (finding.health == Health::kWarn) {
      finding.advice = "ranks on GPUs without access cannot exchange; see `nvidia-smi topo -p2p r`";
    }
    findings.push_back(std::move(finding));
  }
  if (!uniform || !complete) return findings;
  return {{Health::kOk, "gpu peers", fmt::format("all {} GPUs reach each other: {}", num_devices, usual), ""}};
}

/// CUDA's variable for the hardware queues between a process and a GPU, and its default (CUDA programming guide,
/// environment variables).
constexpr const char* kConnectionsVariable = "CUDA_DEVICE_MAX_CONNECTIONS";
constexpr int kDefaultConnections = 8;
/// Streams of a rank: that of its calls, and the library's own for zeroed memory and for refused calls.
constexpr int kStreamsPerGroup = 3;
/// Groups whose calls a rank makes on separate streams, for example one per micro-batch.
constexpr int kUsualNumGroups = 2;

/// Streams that share a connection run in the order of their launches, so kernels of one group can wait behind those of
/// another group that wait for a rank with the reverse order.
Finding examine_connections() {
  const char* const variable = std::getenv(kConnectionsVariable);
  const std::string_view text = variable == nullptr ? "" : variable;
  int connections = kDefaultConnections;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), connections);
  const bool is_set = error == std::errc() && end == text.data() + text.size() && connections > 0;
  if (!is_set) connections = kDefaultConnections;
  constexpr int kEnough = kStreamsPerGroup * kUsualNumGroups;
  Finding finding{Health::kOk, "gpu connections",
                  is_set ? fmt::format("{}={}", kConnectionsVariable, connections)
                         : fmt::format("{} is not set: {}", kConnectionsVariable, connections),
                  ""};
  if (connections < kEnough) {
    finding.health = Health::kWarn;
    finding.advice = fmt::format(
        "streams share connections and wait for each other: calls of two groups on two streams can time out, and "
        "allocate waits for calls; unset it, or {} or more ({} for each group of a rank on the GPU)",
        kEnough, kStreamsPerGroup);
  }
  return finding;
}

/// CUDA's variable for when kernels are loaded (CUDA programming guide, "Lazy Loading"), and the value that loads
/// them at the start of a program.
constexpr const char* kLoadingVariable = "CUDA_MODULE_LOADING";
constexpr std::string_view kLoadsAtOnce = "EAGER";

Finding examine_loading() {
  const char* const variable = std::getenv(kLoadingVariable);
  Finding finding{Health::kOk, "gpu loading",
                  variable == nullptr ? fmt::format("{} is not set", kLoadingVariable)
                                      : fmt::format("{}={}", kLoadingVariable, variable),
                  ""};
  if (variable == nullptr || variable != kLoadsAtOnce) {
    finding.health = Health::kWarn;
    finding.advice = fmt::format(
        "a program's kernel is loaded when it is first launched, which may hold a lock of the driver while kernels "
        "wait for other ranks, and those for memory that this process maps; set {}={}",
        kLoadingVariable, kLoadsAtOnce);
  }
  return finding;
}

constexpr int kFirstGpu = 0;  // hosts with several GPUs have several of one kind

}  // namespace

std::vector<Finding> examine_gpus() {
  if (!built_with_cuda()) return {};  // examine_backends reports it
  auto num_devices = count_devices();
  if (!num_devices) {
    std::vector<Finding> findings = {
        {Health::kMissing, "gpus", std::string(num_devices.status().message()), "ranks run on the CPU"}};
    // The variables may be meant for other machines.
    if (std::getenv(kConnectionsVariable) != nullptr) findings.push_back(examine_connections());
    if (std::getenv(kLoadingVariable) != nullptr) findings.push_back(examine_loading());
    return findings;
  }
  std::vector<Finding> findings;
  bool all_have_descriptors = true;
  std::string pci_address;  // of the first GPU
  for (int device = 0; device < *num_devices; ++device) {
    auto facts = read_device_facts(device);
    findings.push_back(facts ? describe_gpu(*facts) : unreadable(fmt::format("gpu {}", device), facts.status()));
    all_have_descriptors = all_have_descriptors && facts && facts->has_file_descriptor_handles;
    if (device == kFirstGpu && facts) pci_address = facts->pci_address.data();
  }
  for (Finding& finding : examine_peers(*num_devices)) findings.push_back(std::move(finding));
  findings.push_back({Health::kOk, "gpu memory",
                      all_have_descriptors ? "shared between ranks by file descriptors (cuMem)"
                                           : "no file-descriptor handles (cuMem): shared between ranks by cudaIpc",
                      ""});
  findings.push_back(examine_connections());
  findings.push_back(examine_loading());
  if (*num_devices > 0) {
    for (Finding& finding : examine_ring_memory(kFirstGpu, pci_address)) findings.push_back(std::move(finding));
  }
  return findings;
}

}  // namespace ferry::tools
