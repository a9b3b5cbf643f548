#include "conformance/backend_config.hpp"

namespace ferry::test {

std::vector<BackendConfig> backend_configs() {
  std::vector<BackendConfig> configs = whole_configs();
  configs.push_back({"cuda_nodes_loopback_threads", "cuda", RankKind::kThreads, "loopback", true});
  return configs;
}

std::vector<BackendConfig> exchange_configs() {
  std::vector<BackendConfig> configs = backend_configs();
  configs.push_back({.name = "cuda_threads_verify", .backend = "cuda", .kind = RankKind::kThreads, .verify = true});
  return configs;
}

std::vector<BackendConfig> whole_configs() {
  return {
      {"cuda_threads", "cuda", RankKind::kThreads},
      {"cuda_processes", "cuda", RankKind::kProcesses},
  };
}

}  // namespace ferry::test
