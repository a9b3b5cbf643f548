#include "balance/matching.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

namespace ferry::balancing {
namespace {

Placement part_of(const Placement& placement, std::size_t part, std::size_t part_places) {
  const auto first = placement.begin() + static_cast<std::ptrdiff_t>(part * part_places);
  return {first, first + static_cast<std::ptrdiff_t>(part_places)};
}

/// Replicas of an expert in one part.
struct Occurrence {
  std::int32_t expert = 0;
  std::size_t part = 0;
  std::int64_t count = 0;
};

/// By expert, then part; without empty places.
std::vector<Occurrence> parts_by_expert(const Placement& placement, std::size_t part_places) {
  std::vector<std::size_t> places(placement.size());
  std::iota(places.begin(), places.end(), std::size_t{0});
  std::stable_sort(places.begin(), places.end(),
                   [&](std::size_t a, std::size_t b) { return placement[a] < placement[b]; });
  std::vector<Occurrence> occurrences;
  for (const std::size_t place : places) {
    const std::int32_t expert = placement[place];
    const std::size_t part = place / part_places;
    if (expert < 0) continue;
    if (occurrences.empty() || occurrences.back().expert != expert || occurrences.back().part != part) {
      occurrences.push_back({expert, part, 0});
    }
    ++occurrences.back().count;
  }
  return occurrences;
}

/// [num_parts, num_parts]: experts, replicas counted, that a part of `now` and a part of `before` have in common.
std::vector<std::int64_t> overlaps(const std::vector<Occurrence>& now, const std::vector<Occurrence>& before,
                                   std::size_t num_parts) {
  std::vector<std::int64_t> values(num_parts * num_parts, 0);
  auto first = before.begin();
  for (const Occurrence& here : now) {
    while (first != before.end() && first->expert < here.expert) ++first;
    for (auto there = first; there != before.end() && there->expert == here.expert; ++there) {
      values[here.part * num_parts + there->part] += std::min(here.count, there->count);
    }
  }
  return values;
}

/// Assigns one row after another; each may displace earlier rows along a path of least loss (Kuhn, "The Hungarian
/// method for the assignment problem", 1955; as shortest paths with prices that keep every reduced cost at or above
/// zero).
class Assignment {
 public:
  Assignment(const std::vector<std::int64_t>& values, std::size_t n, Interruption* interruption)
      : values_(values), n_(n), interruption_(interruption), row_price_(n, 0), column_price_(n, 0), row_of_(n, kNone) {}

  std::vector<std::size_t> solve() {
    for (std::size_t row = 0; row < n_; ++row) {
      if (interruption_ != nullptr && interruption_->asked()) return in_order();
      // Price of a new row, such that none of its costs is negative.
      std::int64_t lowest = kFar;
      for (std::size_t column = 0; column < n_; ++column) lowest = std::min(lowest, cost(row, column));
      row_price_[row] = lowest == kFar ? 0 : lowest;
      add(row);
    }
    std::vector<std::size_t> columns(n_);
    for (std::size_t column = 0; column < n_; ++column) columns[row_of_[column]] = column;
    return columns;
  }

 private:
  static constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();
  static constexpr std::int64_t kFar = std::numeric_limits<std::int64_t>::max();

  std::vector<std::size_t> in_order() const {
    std::vector<std::size_t> columns(n_);
    std::iota(columns.begin(), columns.end(), std::size_t{0});
    return columns;
  }

  std::int64_t cost(std::size_t row, std::size_t column) const {
    return -values_[row * n_ + column] - row_price_[row] - column_price_[column];
  }

  void add(std::size_t new_row) {
    std::vector<std::int64_t> distance(n_, kFar);
    std::vector<std::size_t> reached_from(n_, kNone);  ///< the column before each column on the path to it
    std::vector<char> done(n_, 0);
    std::size_t row = new_row;
    std::size_t column = kNone;
    std::int64_t walked = 0;
    while (true) {
      std::size_t nearest = kNone;
      for (std::size_t next = 0; next < n_; ++next) {
        if (done[next] != 0) continue;
        const std::int64_t through = walked + cost(row, next);
        if (through < distance[next]) {
          distance[next] = through;
          reached_from[next] = column;
        }
        if (nearest == kNone || distance[next] < distance[nearest]) nearest = next;
      }
      column = nearest;
      walked = distance[column];
      if (row_of_[column] == kNone) break;
      done[column] = 1;
      row = row_of_[column];
    }
    for (std::size_t at = 0; at < n_; ++at) {
      if (done[at] == 0) continue;
      column_price_[at] -= walked - distance[at];
      row_price_[row_of_[at]] += walked - distance[at];
    }
    row_price_[new_row] += walked;
    while (reached_from[column] != kNone) {
      row_of_[column] = row_of_[reached_from[column]];
      column = reached_from[column];
    }
    row_of_[column] = new_row;
  }

  const std::vector<std::int64_t>& values_;
  const std::size_t n_;
  Interruption* interruption_;
  std::vector<std::int64_t> row_price_;
  std::vector<std::int64_t> column_price_;
  std::vector<std::size_t> row_of_;
};

}  // namespace

Placement renumber_parts(const Placement& placement, const Placement& previous, const Renumbering& how) {
  const std::size_t part_places = how.part_places;
  const std::size_t num_parts = placement.size() / part_places;
  const auto values =
      overlaps(parts_by_expert(placement, part_places), parts_by_expert(previous, part_places), num_parts);
  const auto numbers = Assignment(values, num_parts, how.interruption).solve();
  Placement renumbered(placement.size());
  for (std::size_t part = 0; part < num_parts; ++part) {
    const Placement content = part_of(placement, part, part_places);
    std::copy(content.begin(), content.end(),
              renumbered.begin() + static_cast<std::ptrdiff_t>(numbers[part] * part_places));
  }
  return renumbered;
}

Placement keep_places(const Placement& placement, const Placement& previous, std::size_t places_per_rank) {
  Placement kept(placement.size(), -1);
  for (std::size_t first = 0; first < placement.size(); first += places_per_rank) {
    Placement coming = part_of(placement, first / places_per_rank, places_per_rank);
    std::sort(coming.begin(), coming.end());
    for (std::size_t place = first; place < first + places_per_rank; ++place) {
      const auto found = std::lower_bound(coming.begin(), coming.end(), previous[place]);
      if (found == coming.end() || *found != previous[place]) continue;
      kept[place] = *found;
      coming.erase(found);
    }
    auto next = coming.begin();
    for (std::size_t place = first; place < first + places_per_rank; ++place) {
      if (kept[place] < 0) kept[place] = *next++;
    }
  }
  return kept;
}

}  // namespace ferry::balancing
