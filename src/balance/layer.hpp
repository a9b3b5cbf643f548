#ifndef FERRY_BALANCE_LAYER_HPP
#define FERRY_BALANCE_LAYER_HPP

/// Placement of one layer: experts to nodes if the policy requires it, then to places.

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "balance/block.hpp"
#include "balance/interruption.hpp"

namespace ferry::balancing {

struct LayerShape {
  std::size_t num_experts = 0;
  std::size_t num_places = 0;
  std::size_t num_ranks = 1;
  std::size_t num_groups = 1;
  std::size_t num_nodes = 1;  ///< 1 with the global policy

  std::size_t places_per_rank() const { return num_places / num_ranks; }
  std::size_t places_per_node() const { return num_places / num_nodes; }
};

struct SearchEffort {
  int max_steps = 0;
  Interruption* interruption = nullptr;  ///< may be null
};

struct LayerLimits {
  SearchEffort effort;
  std::size_t max_moves = std::numeric_limits<std::size_t>::max();
  double move_weight = 0;  ///< in mean loads
  bool restrained() const { return move_weight > 0 || max_moves != std::numeric_limits<std::size_t>::max(); }
};

struct PlacedLayer {
  Placement experts;  ///< expert in each place, ids of the layer
  double highest = 0;
  double mean = 0;
  std::size_t num_moves = 0;
};

/// `previous` is empty, or has one entry per place, -1 where a place is empty. After an interruption the result
/// is of no use but to be dropped.
PlacedLayer place_layer(const LayerShape& shape, const std::vector<double>& load, const Placement& previous,
                        const LayerLimits& limits);

}  // namespace ferry::balancing

#endif  // FERRY_BALANCE_LAYER_HPP
