#ifndef FERRY_TESTS_EMULATOR_NODE_ROUTING_HPP
#define FERRY_TESTS_EMULATOR_NODE_ROUTING_HPP

/// A route over several nodes, planned as the hosts plan it but without a network, and checked against the oracle's.

#include <cstdint>
#include <string>
#include <vector>

#include "emulator/node_ranks.hpp"
#include "oracle/oracle.hpp"

namespace ferry::emulator {

class NodeRouting {
 public:
  NodeRouting(NodeRanks& ranks, oracle::World world);

  const oracle::World& world() const { return world_; }
  const std::vector<oracle::RankRouting>& routings() const { return routings_; }
  cuda::RoutedTokens routed(int rank) const;
  const cuda::NodeTables& tables(int rank) const { return ranks_[static_cast<std::size_t>(rank)].tables; }
  std::int64_t num_rows(int rank) const { return routings_[static_cast<std::size_t>(rank)].num_recv_rows; }
  std::int64_t num_tokens(int rank) const { return world_.ranks[static_cast<std::size_t>(rank)].num_tokens; }

 private:
  struct Rank {
    Topology topology;
    plan::NodeRoute route;
    cuda::LocalExperts experts;
    cuda::NodeTables::Shape shape;
    DeviceMemory memory;
    cuda::NodeTables tables;
  };
  plan::RouteShape shape() const;

  oracle::World world_;
  std::vector<oracle::RankRouting> routings_;
  std::vector<std::int32_t> owners_;
  std::vector<std::int32_t> local_expert_;
  std::vector<Rank> ranks_;
};

}  // namespace ferry::emulator

#endif  // FERRY_TESTS_EMULATOR_NODE_ROUTING_HPP
