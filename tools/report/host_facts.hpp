#ifndef FERRY_TOOLS_REPORT_HOST_FACTS_HPP
#define FERRY_TOOLS_REPORT_HOST_FACTS_HPP

#include <cstdint>
#include <string>

#include "report/json_report.hpp"

namespace ferry::tools {

/// Host properties recorded with a measurement.
struct HostFacts {
  std::string host_name;
  std::string cpu_model;
  std::string simd;  ///< widest vector instructions of this CPU, e.g. "avx512"
  int num_cpus = 0;  ///< CPUs that this process may run on
  std::int64_t memory_bytes = 0;
  std::int64_t available_memory_bytes = 0;
  std::int64_t memory_limit_bytes = 0;  ///< limit of this process's control group; 0 without one
  std::string kernel;
};

HostFacts read_host_facts();
/// Version of the NVIDIA kernel driver, e.g. "580.65.06"; empty without a driver. Only reads a file.
std::string read_driver_module_version();

/// "name: CPU model, n CPUs", the `host` of a measurement.
std::string describe(const HostFacts& facts);
Json to_json(const HostFacts& facts);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_REPORT_HOST_FACTS_HPP
