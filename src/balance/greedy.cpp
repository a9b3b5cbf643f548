#include "balance/greedy.hpp"

#include <algorithm>
#include <numeric>
#include <queue>

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

/// Ranks to be filled with replicas that stay apart.
class Filling {
 public:
  explicit Filling(const Block& block)
      : block_(block),
        load_(block.num_ranks, 0.0),
        used_(block.num_ranks, 0),
        has_(block.num_ranks * block.load.size(), 0),
        placement_(block.num_places(), -1) {}

  /// Puts a replica on the lightest rank with room and without the expert.
  void put(std::size_t expert, double share) {
    std::size_t best = block_.num_ranks;
    for (std::size_t rank = 0; rank < block_.num_ranks; ++rank) {
      if (used_[rank] == block_.places_per_rank || has(rank, expert)) continue;
      if (best == block_.num_ranks || load_[rank] < load_[best]) best = rank;
    }
    if (best == block_.num_ranks) best = make_room(expert);
    insert(best, expert, share);
  }

  Placement take() { return std::move(placement_); }

 private:
  char& has(std::size_t rank, std::size_t expert) { return has_[rank * block_.load.size() + expert]; }

  void insert(std::size_t rank, std::size_t expert, double share) {
    placement_[rank * block_.places_per_rank + used_[rank]++] = static_cast<std::int32_t>(expert);
    load_[rank] += share;
    has(rank, expert) = 1;
    shares_.resize(std::max(shares_.size(), expert + 1));
    shares_[expert] = share;
  }

  /// Makes room if every rank with room has the expert already. A full rank without it has more experts than such a
  /// rank, so one of them can move over.
  std::size_t make_room(std::size_t expert) {
    std::size_t open = 0;
    while (used_[open] == block_.places_per_rank) ++open;
    for (std::size_t rank = 0;; ++rank) {
      if (has(rank, expert)) continue;
      for (std::size_t i = 0; i < block_.places_per_rank; ++i) {
        std::int32_t& place = placement_[rank * block_.places_per_rank + i];
        const auto moved = static_cast<std::size_t>(place);
        if (has(open, moved)) continue;
        insert(open, moved, shares_[moved]);
        has(rank, moved) = 0;
        load_[rank] -= shares_[moved];
        --used_[rank];
        place = placement_[rank * block_.places_per_rank + used_[rank]];
        return rank;
      }
    }
  }

  const Block& block_;
  std::vector<double> load_;
  std::vector<std::size_t> used_;
  std::vector<char> has_;
  std::vector<double> shares_;
  Placement placement_;
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
  for (const std::size_t item : heaviest_first(weights)) {
    std::size_t best = num_bins;
    for (std::size_t bin = 0; bin < num_bins; ++bin) {
      if (used[bin] < items_per_bin && (best == num_bins || sums[bin] < sums[best])) best = bin;
    }
    bins[item] = best;
    sums[best] += weights[item];
    ++used[best];
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
  for (const std::size_t expert : heaviest_first(shares)) {
    for (std::size_t replica = 0; replica < counts[expert]; ++replica) filling.put(expert, shares[expert]);
  }
  return filling.take();
}

}  // namespace ferry::balancing
