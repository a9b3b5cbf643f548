#include "conformance/backend_config.hpp"

namespace ferry::test {

std::vector<BackendConfig> backend_configs() {
  return {
      {"cpu_threads", "cpu", RankKind::kThreads},
      {"cpu_processes", "cpu", RankKind::kProcesses},
      {"cpu_nodes_loopback_threads", "cpu", RankKind::kThreads, "loopback", true},
      {"cpu_nodes_ucx_processes", "cpu", RankKind::kProcesses, "ucx", true},
      {.name = "cpu_processes_verify", .backend = "cpu", .kind = RankKind::kProcesses, .verify = true},
      {.name = "cpu_nodes_verify",
       .backend = "cpu",
       .kind = RankKind::kThreads,
       .transport = "loopback",
       .several_nodes = true,
       .verify = true},
  };
}

std::vector<BackendConfig> exchange_configs() { return backend_configs(); }

std::vector<BackendConfig> whole_configs() { return backend_configs(); }

}  // namespace ferry::test
