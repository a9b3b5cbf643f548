#include "plan/replicas.hpp"

#include <algorithm>
#include <iterator>

#include "plan/to_size.hpp"

namespace ferry::plan {
namespace {

/// Distance of a home from the rank whose tokens choose.
enum Distance : std::uint8_t { kSameRank = 0, kSameNode = 1, kElsewhere = 2 };

}  // namespace

HomeTable list_homes(const HomeTableParams& params) {
  const std::size_t num_physical = params.physical_to_logical.size();
  const auto distance_of = [&params](std::size_t physical) {
    const int owner = params.physical_to_rank[physical];
    if (!params.nearest || owner == params.rank) return kSameRank;
    return owner / params.ranks_per_node == params.rank / params.ranks_per_node ? kSameNode : kElsewhere;
  };
  std::vector<Distance> least(to_size(params.num_logical), kElsewhere);
  for (std::size_t physical = 0; physical < num_physical; ++physical) {
    const std::int32_t logical = params.physical_to_logical[physical];
    if (logical < 0) continue;
    Distance& distance = least[to_size(logical)];
    if (distance_of(physical) < distance) distance = distance_of(physical);
  }
  const auto is_candidate = [&](std::size_t physical) {
    const std::int32_t logical = params.physical_to_logical[physical];
    return logical >= 0 && distance_of(physical) == least[to_size(logical)];
  };
  HomeTable table;
  table.ranges.resize(to_size(params.num_logical), HomeRange{0, 0});
  for (std::size_t physical = 0; physical < num_physical; ++physical) {
    if (is_candidate(physical)) ++table.ranges[to_size(params.physical_to_logical[physical])].count;
  }
  std::uint32_t next = 0;
  for (HomeRange& range : table.ranges) {
    range.first = next;
    next += range.count;
    range.count = 0;
  }
  table.homes.resize(next);
  for (std::size_t physical = 0; physical < num_physical; ++physical) {
    if (!is_candidate(physical)) continue;
    HomeRange& range = table.ranges[to_size(params.physical_to_logical[physical])];
    table.homes[range.first + range.count++] = static_cast<std::int32_t>(physical);
  }
  return table;
}

HomeTable without_lost_homes(const HomeTable& table, std::span<const std::int32_t> physical_to_rank,
                             const std::vector<bool>& is_lost) {
  HomeTable left;
  left.ranges.reserve(table.ranges.size());
  for (const HomeRange& range : table.ranges) {
    const auto begin = table.homes.begin() + range.first;
    const auto end = begin + range.count;
    const std::size_t first = left.homes.size();
    std::copy_if(begin, end, std::back_inserter(left.homes),
                 [&](std::int32_t home) { return !is_lost[to_size(physical_to_rank[to_size(home)])]; });
    if (left.homes.size() == first) left.homes.insert(left.homes.end(), begin, end);
    left.ranges.push_back({static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(left.homes.size() - first)});
  }
  return left;
}

}  // namespace ferry::plan
