#include "balance/greedy.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>

namespace ferry::balancing {
namespace {

struct Candidate {
  double share = 0;  ///< load per replica
  std::size_t count = 1;
  std::size_t expert = 0;
};

/// Indices by descending weight; ties by index.
std::vector<std::size_t> heaviest_first(const std::vector<double>& weights) {
  std::vector<std::size_t> order(weights.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return weights[a] > weights[b]; });
  return order;
}

/// Bins with room, lightest first (ties: lower index).
class LightestFirst {
 public:
  explicit LightestFirst(std::size_t num_bins) {
    std::vector<Bin> bins;
    for (std::size_t bin = 0; bin < num_bins; ++bin) bins.push_back({0.0, bin});
    queue_ = Queue(std::greater<>(), std::move(bins));
  }

  bool empty() const { return queue_.empty(); }
  std::size_t take() {
    const std::size_t bin = queue_.top().second;
    queue_.pop();
    return bin;
  }
  void put_back(std::size_t bin, double load) { queue_.push({load, bin}); }

 private:
  using Bin = std::pair<double, std::size_t>;
  using Queue = std::priority_queue<Bin, std::vector<Bin>, std::greater<>>;
  Queue queue_;
};

/// Ranks to be filled with replicas that stay apart.
class Filling {
 public:
  explicit Filling(const Block& block)
      : block_(block),
        open_(block.num_ranks),
        load_(block.num_ranks, 0.0),
        used_(block.num_ranks, 0),
        placement_(block.num_places(), -1),
        shares_(block.load.size(), 0.0) {}

  /// Puts every replica of an expert on the lightest rank with room and without the expert.
  void put(std::size_t expert, std::size_t count, double share) {
    shares_[expert] = share;
    having_.clear();
    for (std::size_t replica = 0; replica < count; ++replica) {
      const std::size_t rank = open_.empty() ? make_room() : open_.take();
      insert(rank, expert);
      having_.push_back(rank);
    }
    for (const std::size_t rank : having_) {
      if (has_room(rank)) open_.put_back(rank, load_[rank]);
    }
  }

  Placement take() { return std::move(placement_); }

 private:
  bool has_room(std::size_t rank) const { return used_[rank] < block_.places_per_rank; }
  std::size_t first_of(std::size_t rank) const { return rank * block_.places_per_rank; }

  void insert(std::size_t rank, std::size_t expert) {
    placement_[first_of(rank) + used_[rank]++] = static_cast<std::int32_t>(expert);
    load_[rank] += shares_[expert];
  }

  /// Makes room for an expert that every rank with room has. A full rank without it has more experts than such a
  /// rank, so one of them can move over.
  std::size_t make_room() {
    std::size_t open = 0;
    while (!has_room(open)) ++open;
    const auto first = placement_.begin() + static_cast<std::ptrdiff_t>(first_of(open));
    Placement has(first, first + static_cast<std::ptrdiff_t>(used_[open]));
    std::sort(has.begin(), has.end());
    for (std::size_t rank = 0;; ++rank) {
      // Ranks with room have the expert, and so do full ones that got it just now.
      if (has_room(rank) || std::find(having_.begin(), having_.end(), rank) != having_.end()) continue;
      for (std::size_t i = 0; i < block_.places_per_rank; ++i) {
        std::int32_t& place = placement_[first_of(rank) + i];
        if (std::binary_search(has.begin(), has.end(), place)) continue;
        const auto moved = static_cast<std::size_t>(place);
        insert(open, moved);
        load_[rank] -= shares_[moved];
        --used_[rank];
        place = placement_[first_of(rank) + used_[rank]];
        return rank;
      }
    }
  }

  const Block& block_;
  LightestFirst open_;  ///< ranks with room, without those that have the expert which is being put
  std::vector<std::size_t> having_;
  std::vector<double> load_;
  std::vector<std::size_t> used_;
  Placement placement_;
  std::vector<double> shares_;
};

}  // namespace

std::vector<std::size_t> count_replicas(const std::vector<double>& load, std::size_t num_places, std::size_t max_count,
                                        EqualLoads equal) {
  const auto later = [equal](const Candidate& a, const Candidate& b) {
    if (a.share != b.share) return a.share < b.share;
    if (equal == EqualLoads::kFewerReplicas && a.count != b.count) return a.count > b.count;
    return a.expert > b.expert;
  };
  std::priority_queue<Candidate, std::vector<Candidate>, decltype(later)> queue(later);
  std::vector<std::size_t> counts(load.size(), 1);
  if (max_count > 1) {
    for (std::size_t expert = 0; expert < load.size(); ++expert) queue.push({load[expert], 1, expert});
  }
  for (std::size_t placed = load.size(); placed < num_places; ++placed) {
    const std::size_t expert = queue.top().expert;
    queue.pop();
    const std::size_t count = ++counts[expert];
    if (count < max_count) queue.push({load[expert] / static_cast<double>(count), count, expert});
  }
  return counts;
}

double load_bound(const Block& block) {
  const auto counts = count_replicas(block.load, block.num_places(), block.num_places(), EqualLoads::kLowerId);
  double bound = std::accumulate(block.load.begin(), block.load.end(), 0.0) / static_cast<double>(block.num_ranks);
  for (std::size_t expert = 0; expert < counts.size(); ++expert) {
    bound = std::max(bound, block.load[expert] / static_cast<double>(counts[expert]));
  }
  return bound;
}

std::vector<std::size_t> pack(const std::vector<double>& weights, std::size_t num_bins, std::size_t items_per_bin) {
  std::vector<std::size_t> bins(weights.size());
  std::vector<double> sums(num_bins, 0.0);
  std::vector<std::size_t> used(num_bins, 0);
  LightestFirst open(num_bins);
  for (const std::size_t item : heaviest_first(weights)) {
    const std::size_t bin = open.take();
    bins[item] = bin;
    sums[bin] += weights[item];
    if (++used[bin] < items_per_bin) open.put_back(bin, sums[bin]);
  }
  return bins;
}

Placement place_greedily(const Block& block) {
  const auto counts = count_replicas(block.load, block.num_places(), block.num_places(), EqualLoads::kLowerId);
  std::vector<double> weights;
  std::vector<std::int32_t> experts;
  for (std::size_t expert = 0; expert < counts.size(); ++expert) {
    weights.insert(weights.end(), counts[expert], block.load[expert] / static_cast<double>(counts[expert]));
    experts.insert(experts.end(), counts[expert], static_cast<std::int32_t>(expert));
  }
  const auto ranks = pack(weights, block.num_ranks, block.places_per_rank);
  Placement placement(block.num_places());
  std::vector<std::size_t> used(block.num_ranks, 0);
  for (std::size_t item = 0; item < experts.size(); ++item) {
    placement[ranks[item] * block.places_per_rank + used[ranks[item]]++] = experts[item];
  }
  return placement;
}

Placement place_apart(const Block& block) {
  const auto counts = count_replicas(block.load, block.num_places(), block.num_ranks, EqualLoads::kFewerReplicas);
  std::vector<double> shares(counts.size());
  for (std::size_t expert = 0; expert < counts.size(); ++expert) {
    shares[expert] = block.load[expert] / static_cast<double>(counts[expert]);
  }
  Filling filling(block);
  for (const std::size_t expert : heaviest_first(shares)) filling.put(expert, counts[expert], shares[expert]);
  return filling.take();
}

Placement fill_empty(const Block& block, Placement placement) {
  std::vector<std::size_t> counts(block.load.size(), 0);
  for (const std::int32_t expert : placement) {
    if (expert >= 0) ++counts[static_cast<std::size_t>(expert)];
  }
  const auto candidate = [&](std::size_t expert) {
    return Candidate{block.load[expert] / static_cast<double>(counts[expert]), counts[expert], expert};
  };
  const auto later = [](const Candidate& a, const Candidate& b) {
    return a.share != b.share ? a.share < b.share : a.expert > b.expert;
  };
  std::priority_queue<Candidate, std::vector<Candidate>, decltype(later)> queue(later);
  for (std::size_t expert = 0; expert < counts.size(); ++expert) queue.push(candidate(expert));
  std::vector<char> on_rank(counts.size(), 0);
  std::vector<std::size_t> taken;
  const auto mark = [&](std::size_t rank, char value) {
    for (std::size_t i = 0; i < block.places_per_rank; ++i) {
      const std::int32_t expert = placement[rank * block.places_per_rank + i];
      if (expert >= 0) on_rank[static_cast<std::size_t>(expert)] = value;
    }
  };
  for (std::size_t rank = 0; rank < block.num_ranks; ++rank) {
    mark(rank, 1);
    // An expert that the rank has comes into question again for the next rank only.
    taken.clear();
    for (std::size_t i = 0; i < block.places_per_rank; ++i) {
      std::int32_t& place = placement[rank * block.places_per_rank + i];
      if (place >= 0) continue;
      while (!queue.empty() && on_rank[queue.top().expert] != 0) {
        taken.push_back(queue.top().expert);
        queue.pop();
      }
      const std::size_t best = queue.empty() ? 0 : queue.top().expert;
      if (!queue.empty()) {
        taken.push_back(best);
        queue.pop();
      }
      place = static_cast<std::int32_t>(best);
      on_rank[best] = 1;
      ++counts[best];
    }
    for (const std::size_t expert : taken) queue.push(candidate(expert));
    mark(rank, 0);
  }
  return placement;
}

}  // namespace ferry::balancing
