#ifndef FERRY_TOOLS_DOCTOR_FINDING_HPP
#define FERRY_TOOLS_DOCTOR_FINDING_HPP

#include <string>
#include <vector>

namespace ferry::tools {

enum class Health {
  kOk,       ///< there, and good enough
  kWarn,     ///< works, but see the advice
  kMissing,  ///< absent; the advice says what that costs
};

/// One line of the doctor.
struct Finding {
  Health health = Health::kOk;
  std::string name;
  std::string observed;
  std::string advice;  ///< what to do; empty where there is nothing to do
};

/// Each examines one side of the machine by trying it out rather than by version numbers.
std::vector<Finding> examine_host();
std::vector<Finding> examine_kernel();
std::vector<Finding> examine_launchers();
std::vector<Finding> examine_backends();
/// Nothing in a build without the CUDA backend.
std::vector<Finding> examine_gpus();
/// Routes, dispatches and combines a few tokens between two ranks of this process, on GPUs 0 and 1 for the backend cuda
/// (both on 0 where there is one). Ok exactly if the sums are right.
Finding prove_backend(const std::string& backend);
/// The engines between nodes, the version of UCX that was found, the devices of this host, and which of them a rank
/// here would use between hosts.
std::vector<Finding> examine_networks();
/// Where rings between nodes of GPU ranks are, and what GPUDirect finds here.
std::vector<Finding> examine_ring_memory(int device);
/// The same proof between two ranks of this process as two nodes, over the network that "auto" takes. Ok exactly if the
/// sums are right; missing where there is no network.
Finding prove_nodes();

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DOCTOR_FINDING_HPP
