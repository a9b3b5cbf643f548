#include "balance/layer.hpp"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "balance/exchange.hpp"
#include "balance/greedy.hpp"
#include "balance/matching.hpp"

namespace ferry::balancing {
namespace {

/// Relative distance from the bound at which further steps are not worth their time: loads are forecasts.
constexpr double kCloseToBound = 1e-4;
/// Relative distance from the bound at which further starts are not worth their time either.
constexpr double kGoodEnough = 1e-3;
constexpr int kNumKicks = 16;
/// Smallest relative fall of the highest load that justifies replicas that share a rank.
constexpr double kWorthSharing = 0.01;
/// Difference of highest loads, in mean loads, below which placements count as equal: the one with fewer arrivals is
/// chosen.
constexpr double kAboutEqual = 1e-3;

/// Experts of one node, or of all nodes, and their places.
struct Part {
  Block block;
  std::vector<std::int32_t> experts;  ///< layer id of each expert of the block, ascending
};

/// Node of each group.
using NodeOfGroup = std::vector<std::size_t>;

std::vector<Part> split(const LayerShape& shape, const std::vector<double>& load, const NodeOfGroup& nodes) {
  std::vector<Part> parts(shape.num_nodes);
  const std::size_t group_size = shape.num_experts / nodes.size();
  for (Part& part : parts) {
    part.block.num_ranks = shape.num_ranks / shape.num_nodes;
    part.block.places_per_rank = shape.places_per_rank();
  }
  for (std::size_t expert = 0; expert < shape.num_experts; ++expert) {
    Part& part = parts[nodes[expert / group_size]];
    part.experts.push_back(static_cast<std::int32_t>(expert));
    part.block.load.push_back(load[expert]);
  }
  return parts;
}

Placement to_layer_ids(const Part& part, const Placement& placement) {
  Placement experts;
  for (const std::int32_t id : placement) experts.push_back(part.experts[static_cast<std::size_t>(id)]);
  return experts;
}

/// Converts ids of the layer to ids of the block; -1 for an empty place.
Placement to_block_ids(const Part& part, Placement::const_iterator first) {
  Placement placement;
  for (std::size_t place = 0; place < part.block.num_places(); ++place) {
    const auto found =
        std::lower_bound(part.experts.begin(), part.experts.end(), first[static_cast<std::ptrdiff_t>(place)]);
    placement.push_back(
        first[static_cast<std::ptrdiff_t>(place)] < 0 ? -1 : static_cast<std::int32_t>(found - part.experts.begin()));
  }
  return placement;
}

/// Places a block, never worse than the greedy placement although replicas on separate ranks are preferred.
Placement place_block(const Block& block, const SearchEffort& effort) {
  const Placement greedy = place_greedily(block);
  const double greedy_highest = highest_load(block, greedy);
  const double bound = load_bound(block);
  const ExchangeLimits limits{
      .max_steps = effort.max_steps, .enough = bound * (1 + kCloseToBound), .interruption = effort.interruption};
  if (block.num_places() > block.load.size() * block.num_ranks) return improve(block, greedy, limits);
  ExchangeLimits with_kicks = limits;
  with_kicks.num_kicks = kNumKicks;
  with_kicks.good = bound * (1 + kGoodEnough);
  Placement apart = improve(block, place_apart(block), with_kicks);
  const double apart_highest = highest_load(block, apart);
  if (apart_highest <= std::min(limits.enough, greedy_highest)) return apart;
  Placement other = improve(block, greedy, limits);
  const double other_highest = highest_load(block, other);
  const double leeway = shares_ranks(block, other) ? 1 + kWorthSharing : 1;
  return apart_highest <= std::min(greedy_highest, other_highest * leeway) ? apart : other;
}

Placement place_groups(const LayerShape& shape, const std::vector<double>& load, const NodeOfGroup& nodes,
                       const SearchEffort& effort) {
  Placement experts;
  for (const Part& part : split(shape, load, nodes)) {
    const Placement placed = to_layer_ids(part, place_block(part.block, effort));
    experts.insert(experts.end(), placed.begin(), placed.end());
  }
  return experts;
}

Block whole_layer(const LayerShape& shape, const std::vector<double>& load) {
  return {shape.num_ranks, shape.places_per_rank(), load};
}

std::vector<double> group_loads(const LayerShape& shape, const std::vector<double>& load) {
  std::vector<double> sums(shape.num_groups, 0.0);
  const std::size_t group_size = shape.num_experts / shape.num_groups;
  for (std::size_t expert = 0; expert < shape.num_experts; ++expert) sums[expert / group_size] += load[expert];
  return sums;
}

/// Assigns groups to nodes by packing, and by packing and exchange, and returns the layer with the lower highest load.
Placement place_anew(const LayerShape& shape, const std::vector<double>& load, const SearchEffort& effort) {
  if (shape.num_nodes == 1) return place_groups(shape, load, NodeOfGroup(1, 0), effort);
  const Block groups{shape.num_nodes, shape.num_groups / shape.num_nodes, group_loads(shape, load)};
  const NodeOfGroup packed = pack(groups.load, shape.num_nodes, groups.places_per_rank);
  Placement best = place_groups(shape, load, packed, effort);

  const Placement start = place_greedily(groups);
  const Placement exchanged =
      improve(groups, start,
              {.max_steps = effort.max_steps, .enough = load_bound(groups), .interruption = effort.interruption});
  if (highest_load(groups, exchanged) < highest_load(groups, start)) {
    NodeOfGroup nodes(shape.num_groups);
    for (std::size_t place = 0; place < exchanged.size(); ++place) {
      nodes[static_cast<std::size_t>(exchanged[place])] = place / groups.places_per_rank;
    }
    Placement other = place_groups(shape, load, nodes, effort);
    const Block block = whole_layer(shape, load);
    if (highest_load(block, other) < highest_load(block, best)) best = std::move(other);
  }
  return best;
}

/// Highest load of the greedy algorithm for the whole layer.
double greedy_highest_load(const LayerShape& shape, const std::vector<double>& load) {
  NodeOfGroup nodes(1, 0);
  if (shape.num_nodes > 1) nodes = pack(group_loads(shape, load), shape.num_nodes, shape.num_groups / shape.num_nodes);
  double highest = 0;
  for (const Part& part : split(shape, load, nodes)) {
    highest = std::max(highest, highest_load(part.block, place_greedily(part.block)));
  }
  return highest;
}

Placement align(const LayerShape& shape, Placement placement, const Placement& previous, Interruption* interruption) {
  if (shape.num_nodes > 1) {
    placement = renumber_parts(placement, previous, {shape.places_per_node(), interruption});
  }
  const auto node_places = static_cast<std::ptrdiff_t>(shape.places_per_node());
  Placement aligned;
  for (std::ptrdiff_t first = 0; first < static_cast<std::ptrdiff_t>(placement.size()); first += node_places) {
    const Placement part = renumber_parts({placement.begin() + first, placement.begin() + first + node_places},
                                          {previous.begin() + first, previous.begin() + first + node_places},
                                          {shape.places_per_rank(), interruption});
    aligned.insert(aligned.end(), part.begin(), part.end());
  }
  return keep_places(aligned, previous, shape.places_per_rank());
}

/// Node of each group in `previous`; nullopt if a group lives on two nodes, an expert nowhere, or nodes have different
/// numbers of groups.
std::optional<NodeOfGroup> nodes_of_groups(const LayerShape& shape, const Placement& previous) {
  const std::size_t num_groups = shape.num_nodes == 1 ? 1 : shape.num_groups;
  const std::size_t group_size = shape.num_experts / num_groups;
  NodeOfGroup nodes(num_groups, shape.num_nodes);
  std::vector<char> placed(shape.num_experts, 0);
  for (std::size_t place = 0; place < previous.size(); ++place) {
    if (previous[place] < 0) continue;
    const auto expert = static_cast<std::size_t>(previous[place]);
    const std::size_t node = place / shape.places_per_node();
    std::size_t& home = nodes[expert / group_size];
    if (home != shape.num_nodes && home != node) return std::nullopt;
    home = node;
    placed[expert] = 1;
  }
  if (std::find(placed.begin(), placed.end(), 0) != placed.end()) return std::nullopt;
  std::vector<std::size_t> groups_of(shape.num_nodes, 0);
  for (const std::size_t node : nodes) ++groups_of[node];
  const bool equal = std::all_of(groups_of.begin(), groups_of.end(),
                                 [&](std::size_t count) { return count == num_groups / shape.num_nodes; });
  return equal ? std::optional<NodeOfGroup>(nodes) : std::nullopt;
}

/// Improves the previous placement step by step until the highest load is at most `enough`; nullopt if it does not obey
/// the policy.
std::optional<Placement> place_nearby(const LayerShape& shape, const std::vector<double>& load,
                                      const Placement& previous, const LayerLimits& limits, double enough) {
  const auto nodes = nodes_of_groups(shape, previous);
  if (!nodes) return std::nullopt;
  const std::vector<Part> parts = split(shape, load, *nodes);
  const double mean = std::accumulate(load.begin(), load.end(), 0.0) / static_cast<double>(shape.num_ranks);
  std::vector<Placement> before;
  std::vector<Placement> starts;
  std::vector<double> highest;
  for (std::size_t node = 0; node < parts.size(); ++node) {
    const auto first = static_cast<std::ptrdiff_t>(node * shape.places_per_node());
    before.push_back(to_block_ids(parts[node], previous.begin() + first));
    starts.push_back(fill_empty(parts[node].block, before.back()));
    highest.push_back(highest_load(parts[node].block, starts.back()));
  }
  // The busiest node first; the arrivals that it does not use are left for the others.
  std::vector<std::size_t> order(parts.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return highest[a] > highest[b]; });
  const bool limited = limits.max_moves != std::numeric_limits<std::size_t>::max();
  std::size_t moves_left = limits.max_moves;
  Placement nearby(previous.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::size_t node = order[i];
    const Part& part = parts[node];
    const std::size_t nodes_left = order.size() - i;
    const ExchangeLimits exchange{
        .max_steps = limits.effort.max_steps,
        .enough = std::max(load_bound(part.block) * (1 + kCloseToBound), enough),
        .previous = &before[node],
        .max_moves = limited ? (moves_left + nodes_left - 1) / nodes_left : moves_left,
        .move_cost = limits.move_weight * mean,
        .interruption = limits.effort.interruption,
    };
    const Placement placed = improve(part.block, starts[node], exchange);
    if (limited) moves_left -= std::min(moves_left, count_moves(part.block, before[node], placed));
    const Placement experts = to_layer_ids(part, placed);
    std::copy(experts.begin(), experts.end(),
              nearby.begin() + static_cast<std::ptrdiff_t>(node * shape.places_per_node()));
  }
  return keep_places(nearby, previous, shape.places_per_rank());
}

PlacedLayer describe(const LayerShape& shape, const std::vector<double>& load, Placement experts,
                     const Placement& previous) {
  PlacedLayer layer;
  const Block block = whole_layer(shape, load);
  layer.highest = highest_load(block, experts);
  layer.mean = std::accumulate(load.begin(), load.end(), 0.0) / static_cast<double>(shape.num_ranks);
  if (!previous.empty()) layer.num_moves = count_moves(block, previous, experts);
  layer.experts = std::move(experts);
  return layer;
}

}  // namespace

PlacedLayer place_layer(const LayerShape& shape, const std::vector<double>& load, const Placement& previous,
                        const LayerLimits& limits) {
  Placement placement = place_anew(shape, load, limits.effort);
  if (previous.empty()) {
    placement = keep_places(placement, Placement(placement.size(), -1), shape.places_per_rank());
    return describe(shape, load, std::move(placement), previous);
  }
  PlacedLayer anew =
      describe(shape, load, align(shape, std::move(placement), previous, limits.effort.interruption), previous);
  // Without restraint, the result must not be worse than the greedy placement.
  const double greedy = limits.restrained() ? anew.highest + anew.mean : greedy_highest_load(shape, load);
  const double enough = std::min(greedy, anew.highest + kAboutEqual * anew.mean);
  auto experts = place_nearby(shape, load, previous, limits, enough);
  if (!experts) return anew;
  PlacedLayer nearby = describe(shape, load, std::move(*experts), previous);
  if (anew.num_moves > limits.max_moves) return nearby;
  const auto score = [&](const PlacedLayer& layer) {
    return layer.highest + limits.move_weight * layer.mean * static_cast<double>(layer.num_moves);
  };
  if (nearby.num_moves > anew.num_moves && score(nearby) >= score(anew)) return anew;
  if (score(nearby) > score(anew) + kAboutEqual * anew.mean) return anew;
  return limits.restrained() || nearby.highest <= greedy ? nearby : anew;
}

}  // namespace ferry::balancing
