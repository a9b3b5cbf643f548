#include "conformance/backend_config.hpp"

namespace ferry::test {

std::vector<BackendConfig> backend_configs() {
  return {
      {"cuda_threads", "cuda", RankKind::kThreads},
      {"cuda_processes", "cuda", RankKind::kProcesses},
  };
}

}  // namespace ferry::test
