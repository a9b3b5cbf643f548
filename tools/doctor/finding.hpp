#ifndef FERRY_TOOLS_DOCTOR_FINDING_HPP
#define FERRY_TOOLS_DOCTOR_FINDING_HPP

#include <string>
#include <vector>

namespace ferry::tools {

enum class Health {
  kOk,       ///< there, and good enough
  kWarn,     ///< works, but see the advice
  kMissing,  ///< not there; the advice says what that costs
};

/// One line of the doctor.
struct Finding {
  Health health = Health::kOk;
  std::string name;
  std::string observed;
  std::string advice;  ///< what to do; empty where there is nothing to do
};

/// Each looks at one side of the machine, and tries things rather than believe version numbers.
std::vector<Finding> examine_host();
std::vector<Finding> examine_kernel();
std::vector<Finding> examine_launchers();
std::vector<Finding> examine_backends();
/// Routes, dispatches and combines a few tokens between two ranks of this process. Ok exactly if the sums are right.
Finding prove_cpu_backend();

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DOCTOR_FINDING_HPP
