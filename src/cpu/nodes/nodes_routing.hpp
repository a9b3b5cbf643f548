#ifndef FERRY_CPU_NODES_NODES_ROUTING_HPP
#define FERRY_CPU_NODES_NODES_ROUTING_HPP

/// A Routing over several nodes: besides the tables of one node, who carries what between nodes.

#include <cstdint>
#include <vector>

#include "cpu/cpu_routing.hpp"
#include "hop/hop_table.hpp"

namespace ferry::cpu {

struct NodesRouting final : CpuRouting {
  /// By node: this rank's tokens that go there. That of its own node moves without the network.
  std::vector<hop::HopTable> outgoing;
  /// By node: tokens of the rail peer there that come to this node, for this rank to hand on. Empty for its own node.
  std::vector<hop::HopTable> incoming;
  /// [R] items that each rank sends to this node (its own ranks: through memory).
  std::vector<std::int32_t> num_items_from_rank;
  /// [num_used_rows] item of each row's token in its source's table for this node; 0 in rows without a token.
  std::vector<std::int32_t> item_of_row;
};

}  // namespace ferry::cpu

#endif  // FERRY_CPU_NODES_NODES_ROUTING_HPP
