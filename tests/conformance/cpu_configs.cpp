#include "conformance/backend_config.hpp"

namespace ferry::test {

std::vector<BackendConfig> backend_configs() {
  return {
      {"cpu_threads", "cpu", RankKind::kThreads},
      {"cpu_processes", "cpu", RankKind::kProcesses},
  };
}

}  // namespace ferry::test
