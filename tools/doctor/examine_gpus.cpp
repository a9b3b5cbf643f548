#include <fmt/format.h>

#include <string>
#include <vector>

#include "device/device_facts.hpp"
#include "device/device_memory.hpp"
#include "doctor/finding.hpp"
#include "report/host_facts.hpp"
#include "report/table.hpp"

namespace ferry::tools {

namespace {

Finding unreadable(const std::string& name, const Status& status) {
  return {Health::kWarn, name, status.to_string(), "run nvidia-smi to see whether the driver works"};
}

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

Finding describe_gpu(const DeviceFacts& facts) {
  const std::string driver = read_driver_module_version();
  return {Health::kOk, fmt::format("gpu {}", facts.ordinal),
          fmt::format("{}, compute capability {}.{}, {} SMs, {}, driver {}(CUDA {})", facts.name.data(),
                      facts.compute_major, facts.compute_minor, facts.num_sms,
                      format_bytes(static_cast<double>(facts.memory_bytes)), driver.empty() ? "" : driver + " ",
                      version_text(facts.driver_version)),
          ""};
}

std::string describe_peer(const PeerFacts& facts) {
  if (!facts.has_access) return "no access";
  return fmt::format("access, performance rank {}, {} atomics", facts.performance_rank,
                     facts.has_native_atomics ? "native" : "no native");
}

/// One line where all pairs are alike, else one for each GPU.
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

}  // namespace

std::vector<Finding> examine_gpus() {
  if (!built_with_cuda()) return {};  // examine_backends reports it
  auto num_devices = count_devices();
  if (!num_devices) {
    return {{Health::kMissing, "gpus", std::string(num_devices.status().message()), "ranks run on the CPU"}};
  }
  std::vector<Finding> findings;
  bool all_have_descriptors = true;
  for (int device = 0; device < *num_devices; ++device) {
    auto facts = read_device_facts(device);
    findings.push_back(facts ? describe_gpu(*facts) : unreadable(fmt::format("gpu {}", device), facts.status()));
    all_have_descriptors = all_have_descriptors && facts && facts->has_file_descriptor_handles;
  }
  for (Finding& finding : examine_peers(*num_devices)) findings.push_back(std::move(finding));
  findings.push_back({Health::kOk, "gpu memory",
                      all_have_descriptors ? "shared between ranks by file descriptors (cuMem)"
                                           : "no file-descriptor handles (cuMem): shared between ranks by cudaIpc",
                      ""});
  return findings;
}

}  // namespace ferry::tools
