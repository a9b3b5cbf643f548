#include "ferry/balance.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>

#include "balance/arguments.hpp"
#include "balance/layer.hpp"
#include "numeric/without_exceptions.hpp"

namespace ferry {
namespace {

using balancing::Interruption;
using balancing::LayerLimits;
using balancing::LayerShape;
using balancing::PlacedLayer;

LayerShape shape_of(const BalanceOptions& options, std::int64_t num_experts, BalancePolicy policy) {
  LayerShape shape;
  shape.num_experts = static_cast<std::size_t>(num_experts);
  shape.num_places = static_cast<std::size_t>(options.num_replicas);
  shape.num_ranks = static_cast<std::size_t>(options.num_ranks);
  if (policy == BalancePolicy::kHierarchical) {
    shape.num_groups = static_cast<std::size_t>(options.num_groups);
    shape.num_nodes = static_cast<std::size_t>(options.num_nodes);
  }
  return shape;
}

LayerLimits limits_of(const BalanceOptions& options, Interruption* interruption) {
  LayerLimits limits{.effort = {options.max_steps, interruption}, .move_weight = options.move_weight};
  if (options.max_moves >= 0) limits.max_moves = static_cast<std::size_t>(options.max_moves);
  return limits;
}

/// Derives the replicas of each expert, and their places, from physical_to_logical.
Status index_replicas(Balance* balance) {
  const auto num_layers = static_cast<std::size_t>(balance->num_layers);
  const auto num_experts = static_cast<std::size_t>(balance->num_experts);
  const auto num_physical = static_cast<std::size_t>(balance->num_replicas);
  const auto row_of = [&](std::size_t layer, std::size_t place) {
    return layer * num_experts + static_cast<std::size_t>(balance->physical_to_logical[layer * num_physical + place]);
  };
  balance->replica_counts.assign(num_layers * num_experts, 0);
  for (std::size_t layer = 0; layer < num_layers; ++layer) {
    for (std::size_t place = 0; place < num_physical; ++place) ++balance->replica_counts[row_of(layer, place)];
  }
  for (const std::int32_t count : balance->replica_counts) {
    balance->max_replicas = std::max<std::int64_t>(balance->max_replicas, count);
  }
  const Status status = balancing::check_entries({"balance", "the table of each expert's replicas"},
                                                 balance->num_layers, balance->num_experts * balance->max_replicas);
  if (!status) return status;
  const auto width = static_cast<std::size_t>(balance->max_replicas);
  balance->logical_to_physical.assign(num_layers * num_experts * width, -1);
  std::vector<std::size_t> used(num_experts);
  for (std::size_t layer = 0; layer < num_layers; ++layer) {
    std::fill(used.begin(), used.end(), 0);
    for (std::size_t place = 0; place < num_physical; ++place) {
      const std::size_t row = row_of(layer, place);
      balance->logical_to_physical[row * width + used[row % num_experts]++] = static_cast<std::int32_t>(place);
    }
  }
  return {};
}

Result<Balance> place_all(const ConstTensorView& load, const BalanceOptions& options) {
  if (Status status = balancing::check_load(load); !status) return status;
  const std::int64_t num_experts = load.extent(1);
  if (Status status = balancing::check_options(options, load.extent(0), num_experts); !status) return status;
  auto loads = balancing::read_load(load);
  if (!loads) return loads.status();
  std::vector<std::int32_t> previous;
  if (options.previous.present()) {
    auto read = balancing::read_placement(
        options.previous, {"balance", "options.previous", load.extent(0), options.num_replicas, num_experts});
    if (!read) return read.status();
    previous = std::move(*read);
  }

  Balance result;
  result.num_layers = load.extent(0);
  result.num_experts = num_experts;
  result.num_replicas = options.num_replicas;
  result.num_ranks = options.num_ranks;
  result.policy = options.policy;
  if (options.policy == BalancePolicy::kAuto) {
    result.policy = options.num_groups % options.num_nodes == 0 ? BalancePolicy::kHierarchical : BalancePolicy::kGlobal;
  }
  const LayerShape shape = shape_of(options, num_experts, result.policy);
  Interruption interruption(options.interrupted);
  const LayerLimits limits = limits_of(options, &interruption);
  for (std::ptrdiff_t layer = 0; layer < load.extent(0); ++layer) {
    const auto first_load = loads->begin() + layer * num_experts;
    const auto first_place = previous.begin() + (previous.empty() ? 0 : layer * options.num_replicas);
    const balancing::Placement before(first_place, previous.empty() ? first_place : first_place + options.num_replicas);
    const PlacedLayer placed = place_layer(shape, {first_load, first_load + num_experts}, before, limits);
    if (interruption.asked()) {
      return Status(ErrorCode::kSystem, fmt::format("balance: stopped in layer {} of {}, as the program asked "
                                                    "(BalanceOptions::interrupted); nothing is placed",
                                                    layer, load.extent(0)));
    }
    result.physical_to_logical.insert(result.physical_to_logical.end(), placed.experts.begin(), placed.experts.end());
    result.max_load.push_back(placed.highest);
    result.mean_load.push_back(placed.mean);
    result.num_moves.push_back(static_cast<std::int64_t>(placed.num_moves));
  }
  if (Status status = index_replicas(&result); !status) return status;
  return result;
}

}  // namespace

std::string_view to_string(BalancePolicy policy) {
  switch (policy) {
    case BalancePolicy::kAuto:
      return "auto";
    case BalancePolicy::kHierarchical:
      return "hierarchical";
    case BalancePolicy::kGlobal:
      return "global";
  }
  return "?";
}

Result<Balance> balance(const ConstTensorView& load, const BalanceOptions& options) {
  return numeric::without_exceptions("balance", [&] { return place_all(load, options); });
}

}  // namespace ferry
