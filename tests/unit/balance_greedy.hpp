#ifndef FERRY_TESTS_UNIT_BALANCE_GREEDY_HPP
#define FERRY_TESTS_UNIT_BALANCE_GREEDY_HPP

/// Reference for balancing: the greedy algorithm published with DeepSeek-V3 (technical report, section 3.4, and its
/// load balancer), written from its description, and a bound that no placement can beat.

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>
#include <vector>

namespace ferry::testing {

struct BalanceCase {
  std::vector<double> load;  ///< [E]
  int num_replicas = 0;
  int num_groups = 1;
  int num_nodes = 1;
  int num_ranks = 1;
};

/// Box of each item: items from heavy to light each go to the lightest box that is not full.
inline std::vector<int> boxes_by_weight(const std::vector<double>& weights, int num_boxes) {
  const std::size_t room = weights.size() / static_cast<std::size_t>(num_boxes);
  std::vector<std::size_t> order(weights.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return weights[a] > weights[b]; });
  std::vector<std::pair<double, std::size_t>> boxes(static_cast<std::size_t>(num_boxes));  // weight, items
  std::vector<int> box_of(weights.size());
  for (const std::size_t item : order) {
    int best = -1;
    for (int box = 0; box < num_boxes; ++box) {
      const auto& candidate = boxes[static_cast<std::size_t>(box)];
      if (candidate.second == room) continue;
      if (best < 0 || candidate.first < boxes[static_cast<std::size_t>(best)].first) best = box;
    }
    box_of[item] = best;
    boxes[static_cast<std::size_t>(best)].first += weights[item];
    ++boxes[static_cast<std::size_t>(best)].second;
  }
  return box_of;
}

/// Load per replica of each replica. Replicas go one by one to the expert with the most load per replica.
inline std::vector<double> replica_loads(const std::vector<double>& load, int num_replicas) {
  std::vector<int> counts(load.size(), 1);
  for (auto n = static_cast<int>(load.size()); n < num_replicas; ++n) {
    std::size_t heaviest = 0;
    for (std::size_t e = 1; e < load.size(); ++e) {
      if (load[e] / counts[e] > load[heaviest] / counts[heaviest]) heaviest = e;
    }
    ++counts[heaviest];
  }
  std::vector<double> loads;
  for (std::size_t e = 0; e < load.size(); ++e) {
    loads.insert(loads.end(), static_cast<std::size_t>(counts[e]), load[e] / counts[e]);
  }
  return loads;
}

inline double heaviest_box(const std::vector<double>& weights, int num_boxes) {
  const auto boxes = boxes_by_weight(weights, num_boxes);
  std::vector<double> sums(static_cast<std::size_t>(num_boxes), 0.0);
  for (std::size_t i = 0; i < weights.size(); ++i) sums[static_cast<std::size_t>(boxes[i])] += weights[i];
  return *std::max_element(sums.begin(), sums.end());
}

inline std::vector<double> group_weights(const BalanceCase& in) {
  const std::size_t group_size = in.load.size() / static_cast<std::size_t>(in.num_groups);
  std::vector<double> weights(static_cast<std::size_t>(in.num_groups), 0.0);
  for (std::size_t e = 0; e < in.load.size(); ++e) weights[e / group_size] += in.load[e];
  return weights;
}

/// Load of the busiest rank. Hierarchical if nodes divide the groups, as published.
inline double greedy_max_load(const BalanceCase& in) {
  if (in.num_groups % in.num_nodes != 0) return heaviest_box(replica_loads(in.load, in.num_replicas), in.num_ranks);
  const auto node_of = boxes_by_weight(group_weights(in), in.num_nodes);
  const std::size_t group_size = in.load.size() / static_cast<std::size_t>(in.num_groups);
  double highest = 0;
  for (int node = 0; node < in.num_nodes; ++node) {
    std::vector<double> load;
    for (std::size_t e = 0; e < in.load.size(); ++e) {
      if (node_of[e / group_size] == node) load.push_back(in.load[e]);
    }
    const auto loads = replica_loads(load, in.num_replicas / in.num_nodes);
    highest = std::max(highest, heaviest_box(loads, in.num_ranks / in.num_nodes));
  }
  return highest;
}

/// Least possible load of the heaviest node, by trying all ways to put groups on nodes.
inline double least_node_load(const std::vector<double>& groups, std::vector<std::pair<double, std::size_t>>* nodes,
                              std::size_t next, double best) {
  if (next == groups.size()) return std::max_element(nodes->begin(), nodes->end())->first;
  const std::size_t room = groups.size() / nodes->size();
  for (auto& node : *nodes) {
    if (node.second == room || node.first + groups[next] >= best) continue;
    const bool empty = node.second == 0;
    node.first += groups[next], ++node.second;
    best = std::min(best, least_node_load(groups, nodes, next + 1, best));
    node.first -= groups[next], --node.second;
    if (empty) break;  // empty nodes are alike
  }
  return best;
}

/// Lower bound of the busiest rank's load for any placement: the mean, or one replica of the heaviest expert when
/// counts are chosen to make the heaviest replica light. With few groups on nodes also a rank's share of the heaviest
/// node.
inline double max_load_bound(const BalanceCase& in) {
  const auto loads = replica_loads(in.load, in.num_replicas);
  double bound = std::accumulate(in.load.begin(), in.load.end(), 0.0) / in.num_ranks;
  bound = std::max(bound, *std::max_element(loads.begin(), loads.end()));
  constexpr int kFewGroups = 12;  // 15,400 ways on four nodes
  if (in.num_groups % in.num_nodes != 0 || in.num_groups > kFewGroups) return bound;
  std::vector<std::pair<double, std::size_t>> nodes(static_cast<std::size_t>(in.num_nodes));
  const auto groups = group_weights(in);
  const double total = std::accumulate(groups.begin(), groups.end(), 1.0);
  // Sums in another order differ in their last bits.
  return std::max(bound, least_node_load(groups, &nodes, 0, total) * in.num_nodes / in.num_ranks * (1 - 1e-12));
}

}  // namespace ferry::testing

#endif  // FERRY_TESTS_UNIT_BALANCE_GREEDY_HPP
