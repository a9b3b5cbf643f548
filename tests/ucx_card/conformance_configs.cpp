#include "conformance/backend_config.hpp"
#include "ucx_card/hosts.hpp"

namespace ferry::test {

std::vector<BackendConfig> backend_configs() {
  return {{"cpu_nodes_card_threads", "cpu", RankKind::kThreads, "ucx", true, enter_host},
          {"cpu_nodes_card_processes", "cpu", RankKind::kProcesses, "ucx", true, enter_host}};
}

std::vector<BackendConfig> exchange_configs() { return backend_configs(); }

std::vector<BackendConfig> whole_configs() { return backend_configs(); }

}  // namespace ferry::test
