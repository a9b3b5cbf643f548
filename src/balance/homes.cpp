#include "balance/homes.hpp"

#include <algorithm>

namespace ferry::balancing {
namespace {

/// First home at or after `rank`.
template <typename List>
auto home_from(List& homes, std::size_t rank) {
  return std::lower_bound(homes.begin(), homes.end(), rank,
                          [](const Homes::Home& home, std::size_t wanted) { return home.rank < wanted; });
}

}  // namespace

Homes::Homes(const Block& block, const Placement& placement) : homes_(block.load.size()) {
  for (std::size_t place = 0; place < placement.size(); ++place) {
    if (placement[place] >= 0) add(static_cast<std::size_t>(placement[place]), place / block.places_per_rank);
  }
}

std::int32_t Homes::at(std::size_t expert, std::size_t rank) const {
  const auto& homes = homes_[expert];
  const auto found = home_from(homes, rank);
  return found != homes.end() && found->rank == rank ? found->count : 0;
}

void Homes::add(std::size_t expert, std::size_t rank) {
  auto& homes = homes_[expert];
  const auto found = home_from(homes, rank);
  if (found != homes.end() && found->rank == rank) {
    ++found->count;
  } else {
    homes.insert(found, {rank, 1});
  }
}

void Homes::remove(std::size_t expert, std::size_t rank) {
  auto& homes = homes_[expert];
  const auto found = home_from(homes, rank);
  if (--found->count == 0) homes.erase(found);
}

}  // namespace ferry::balancing
