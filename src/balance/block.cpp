#include "balance/block.hpp"

#include <algorithm>

namespace ferry::balancing {

std::vector<double> rank_loads(const Block& block, const Placement& placement) {
  std::vector<std::size_t> counts(block.load.size(), 0);
  for (const std::int32_t expert : placement) ++counts[static_cast<std::size_t>(expert)];
  std::vector<double> loads(block.num_ranks, 0.0);
  for (std::size_t place = 0; place < placement.size(); ++place) {
    const auto expert = static_cast<std::size_t>(placement[place]);
    loads[place / block.places_per_rank] += block.load[expert] / static_cast<double>(counts[expert]);
  }
  return loads;
}

double highest_load(const Block& block, const Placement& placement) {
  const auto loads = rank_loads(block, placement);
  return *std::max_element(loads.begin(), loads.end());
}

bool shares_ranks(const Block& block, const Placement& placement) {
  const auto per_rank = static_cast<std::ptrdiff_t>(block.places_per_rank);
  for (auto first = placement.begin(); first != placement.end(); first += per_rank) {
    Placement experts(first, first + per_rank);
    std::sort(experts.begin(), experts.end());
    if (std::adjacent_find(experts.begin(), experts.end()) != experts.end()) return true;
  }
  return false;
}

}  // namespace ferry::balancing
