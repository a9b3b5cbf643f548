#ifndef FERRY_TOOLS_DOCTOR_FINDING_HPP
#define FERRY_TOOLS_DOCTOR_FINDING_HPP

#include <string>
#include <vector>

namespace ferry::tools {

enum class Health {
  kOk,       ///< present, and good enough
  kWarn,     ///< works, but see the advice
  kMissing,  ///< absent; the advice names the consequence
};

/// One line of the doctor.
struct Finding {
  Health health = Health::kOk;
  std::string name;
  std::string observed;
  std::string advice;  ///< remedy; empty if there is nothing to do
};

/// Each function examines one side of the machine by trying it out rather than by version numbers.
std::vector<Finding> examine_host();
std::vector<Finding> examine_kernel();
std::vector<Finding> examine_launchers();
std::vector<Finding> examine_backends();
/// Empty in a build without the CUDA backend.
std::vector<Finding> examine_gpus();
/// Routes, dispatches and combines a few tokens between two ranks of this process, on GPUs 0 and 1 for the backend cuda
/// (both on GPU 0 if there is only one). Ok exactly if the sums are right.
Finding prove_backend(const std::string& backend);
/// Lists the engines between nodes, the version of UCX that was found, the devices of this host, and the devices that a
/// rank here would use between hosts.
std::vector<Finding> examine_networks();
/// Location of the rings between nodes of GPU ranks, and the state of GPUDirect here.
std::vector<Finding> examine_ring_memory(int device, const std::string& pci_address);
/// Same proof between two ranks of this process as two nodes, over the network that "auto" selects. Ok exactly if the
/// sums are right; missing without a network.
Finding prove_nodes();

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DOCTOR_FINDING_HPP
