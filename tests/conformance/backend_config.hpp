#ifndef FERRY_TESTS_BACKEND_CONFIG_HPP
#define FERRY_TESTS_BACKEND_CONFIG_HPP

/// Configurations of the conformance suite. A new backend is one more line in cpu_configs.cpp, or in gpu_configs.cpp if
/// it needs hardware that not every machine has.

#include <gtest/gtest.h>

#include <functional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "support/exchange_case.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {

struct BackendConfig {
  const char* name;
  const char* backend;  ///< GroupOptions::backend
  RankKind kind;
  const char* transport = "auto";  ///< GroupOptions::transport
  bool several_nodes = false;      ///< where the number of ranks allows it
  /// Called by each rank first, with the number of its node. Null: all nodes are on this host.
  void (*enter_host)(int host) = nullptr;
  bool verify = false;  ///< GroupOptions::verify
};

/// Prints the parameter of a failed test for GoogleTest.
void PrintTo(const BackendConfig& config, std::ostream* out);

/// Configurations of this test program.
std::vector<BackendConfig> backend_configs();
/// backend_configs(), and those that have no latency mode.
std::vector<BackendConfig> exchange_configs();
/// Configurations that have masks of lost ranks and bytes_required.
std::vector<BackendConfig> whole_configs();

/// Names the instantiations of every suite.
std::string config_name(const ::testing::TestParamInfo<BackendConfig>& info);

using GroupBody = std::function<void(RankContext&, Group&)>;

/// Base of the suites: each test runs on every configuration.
class Conformance : public ::testing::TestWithParam<BackendConfig> {
 protected:
  GroupOptions group_options(const RankContext& context) const;
  /// Ranks per node in a group of `num_ranks`: all, or the most that give at least two nodes.
  int ranks_per_node(int num_ranks) const;
  /// Oracle's results of the case, with its ranks spread over nodes by ranks_per_node().
  PreparedCase prepare(ExchangeCase spec) const;
  bool on_gpus() const { return std::string_view(GetParam().backend) == "cuda"; }
  /// Runs `body` on every rank.
  void run_on_ranks(int num_ranks, const RankBody& body) const;
  /// Runs `body` on every rank with a new group, then destroys the group.
  void run_with_group(int num_ranks, const GroupBody& body) const;
  /// Checks the cases one after the other on one group.
  void run_cases(int num_ranks, const std::vector<ExchangeCase>& cases, const KernelOptions& kernel = {}) const;

  /// GroupOptions::latency_bytes of the groups of this test.
  std::size_t latency_bytes_ = 0;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_BACKEND_CONFIG_HPP
