#ifndef FERRY_BALANCE_ARGUMENTS_HPP
#define FERRY_BALANCE_ARGUMENTS_HPP

/// Checks of callers' arguments, and conversion of the arguments to flat arrays.

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "ferry/balance.hpp"

namespace ferry::balancing {

/// Requirements on a matrix of physical experts.
struct PlacementRule {
  std::string_view call;
  std::string_view name;
  std::int64_t num_layers = -1;    ///< -1: any
  std::int64_t num_physical = -1;  ///< -1: any
  std::int64_t num_experts = 0;
};

/// Checked placement, [layers, P], row-major.
Result<std::vector<std::int32_t>> read_placement(const ConstTensorView& view, const PlacementRule& rule);

/// Checks shape, dtype and pointer.
Status check_load(const ConstTensorView& load);

/// Loads, [layers, E], row-major, each of them checked.
/// @pre check_load() accepts the view
Result<std::vector<double>> read_load(const ConstTensorView& load);

Status check_options(const BalanceOptions& options, std::int64_t num_layers, std::int64_t num_experts);

/// Checks that layers * per_layer is at most kMaxBalanceEntries.
Status check_entries(const PlacementRule& rule, std::int64_t num_layers, std::int64_t per_layer);

/// Checks that numbers of ranks, nodes and places divide each other, and the number of ranks.
Status check_ranks(std::string_view call, std::int64_t num_physical, int num_ranks, int num_nodes);

}  // namespace ferry::balancing

#endif  // FERRY_BALANCE_ARGUMENTS_HPP
