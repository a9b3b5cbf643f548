#include <cstdlib>
#include <mutex>

#include "conformance/backend_config.hpp"
#include "ucx_card/hosts.hpp"

namespace ferry::test {
namespace {

/// Sets the variables of the groups of a test before a rank of it reads them; each test has a process of its own.
void enter_with_order(int host, const char* order) {
  static std::once_flag set;
  std::call_once(set, [order] {
    setenv("FERRY_RING_MEMORY", "gpu", 1);
#ifdef FERRY_TEST_REAL_GPUS
    setenv("FERRY_UCX_CARD", "gpu=1,seed=5,latency_ns=50000,piece_bytes=4096", 1);
#else
    setenv("FERRY_UCX_CARD", "seed=5,latency_ns=2000000,piece_bytes=512", 1);
#endif
    setenv("FERRY_CARD_ORDER", order, 1);
  });
  enter_host(host);
}

}  // namespace

std::vector<BackendConfig> backend_configs() {
  return {{"cuda_nodes_card_flush", "cuda", RankKind::kThreads, "ucx", true,
           [](int host) { enter_with_order(host, "flush"); }},
          {"cuda_nodes_card_fence", "cuda", RankKind::kThreads, "ucx", true,
           [](int host) { enter_with_order(host, "fence"); }}};
}

std::vector<BackendConfig> exchange_configs() { return backend_configs(); }

std::vector<BackendConfig> whole_configs() { return {}; }

}  // namespace ferry::test
