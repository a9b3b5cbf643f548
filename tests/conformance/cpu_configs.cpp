#include "conformance/backend_config.hpp"

namespace ferry::test {

std::vector<BackendConfig> backend_configs() {
  return {
      {"cpu_threads", "cpu", RankKind::kThreads},
      {"cpu_processes", "cpu", RankKind::kProcesses},
      {"cpu_nodes_loopback_threads", "cpu", RankKind::kThreads, "loopback", true},
      {"cpu_nodes_ucx_processes", "cpu", RankKind::kProcesses, "ucx", true},
  };
}

std::vector<BackendConfig> whole_configs() { return backend_configs(); }

}  // namespace ferry::test
