#ifndef FERRY_TESTS_NODE_SHAPE_HPP
#define FERRY_TESTS_NODE_SHAPE_HPP

/// Groups of several nodes on CPU ranks: number of nodes, ranks per node, and engine.

#include <gtest/gtest.h>

#include <functional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "support/exchange_case.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {

struct NodeShape {
  int num_nodes;
  int ranks_per_node;
  const char* transport;
  bool over_shared_memory = false;  ///< for UCX, which uses it only if configured to
  bool verify = false;              ///< GroupOptions::verify

  int num_ranks() const { return num_nodes * ranks_per_node; }
  /// Processes share only the network; the loopback engine works only between threads.
  RankKind kind() const {
    return std::string_view(transport) == "loopback" ? RankKind::kThreads : RankKind::kProcesses;
  }
  GroupOptions options() const;
};

/// Shapes from one rank per node to a single node, over each engine.
std::vector<NodeShape> node_shapes();

/// Prints the parameter of a failed test for GoogleTest.
void PrintTo(const NodeShape& shape, std::ostream* out);

/// Names the instantiations of every suite.
std::string shape_name(const testing::TestParamInfo<NodeShape>& info);

/// Oracle's results of the case on these nodes.
PreparedCase prepare_on(const NodeShape& shape, ExchangeCase spec);

/// Runs `body` on every rank with a new group, then destroys the group.
void run_on_nodes(const NodeShape& shape, const std::function<void(RankContext&, Group&)>& body);

}  // namespace ferry::test

#endif  // FERRY_TESTS_NODE_SHAPE_HPP
