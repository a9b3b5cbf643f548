#include "balance/exchange.hpp"

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

namespace ferry::balancing {
namespace {

/// Smallest gain, in mean loads; smaller ones are rounding errors of the sums.
constexpr double kLeastGain = 1e-9;

/// Number of replicas of each expert on each rank.
class Presence {
 public:
  Presence(const Block& block, const Placement& placement)
      : num_ranks_(block.num_ranks), counts_(block.load.size() * block.num_ranks, 0) {
    for (std::size_t place = 0; place < placement.size(); ++place) {
      if (placement[place] >= 0) ++at(static_cast<std::size_t>(placement[place]), place / block.places_per_rank);
    }
  }
  std::int32_t& at(std::size_t expert, std::size_t rank) { return counts_[expert * num_ranks_ + rank]; }
  std::int32_t at(std::size_t expert, std::size_t rank) const { return counts_[expert * num_ranks_ + rank]; }

 private:
  std::size_t num_ranks_;
  std::vector<std::int32_t> counts_;
};

/// A candidate step: place `from` gets the expert of place `other` and, in a swap, place `other` gets that of `from`;
/// in a replacement `from` gets `expert`.
struct Step {
  double highest = 0;  ///< highest load afterwards among the ranks that the step changes
  double merit = 0;    ///< 0: no step
  std::size_t from = 0;
  std::size_t other = 0;
  std::size_t expert = 0;
  bool swap = false;
};

class Search {
 public:
  Search(const Block& block, Placement start, const ExchangeLimits& limits)
      : block_(block),
        limits_(limits),
        placement_(std::move(start)),
        on_(block, placement_),
        before_(block, limits.previous != nullptr ? *limits.previous : Placement()),
        counts_(block.load.size(), 0),
        shares_(block.load.size(), 0.0),
        ranks_of_(block.load.size()),
        load_(block.num_ranks, 0.0) {
    for (const std::int32_t expert : placement_) ++counts_[static_cast<std::size_t>(expert)];
    for (std::size_t expert = 0; expert < counts_.size(); ++expert) refresh_expert(expert);
    for (std::size_t rank = 0; rank < load_.size(); ++rank) refresh_load(rank);
    const double total = std::accumulate(block.load.begin(), block.load.end(), 0.0);
    least_gain_ = kLeastGain * total / static_cast<double>(block.num_ranks);
    if (limits.previous != nullptr) num_moves_ = count_moves(block, *limits.previous, placement_);
  }

  Placement run() {
    best_ = placement_;
    best_score_ = score();
    for (int step = 0; step < limits_.max_steps; ++step) {
      busiest_ = static_cast<std::size_t>(std::max_element(load_.begin(), load_.end()) - load_.begin());
      if (load_[busiest_] <= limits_.enough) break;
      step_ = Step{.highest = load_[busiest_] - least_gain_};
      find_swap();
      find_replacement();
      if (step_.merit <= 0) break;
      take_step();
      // If arrivals cost nothing, each step leaves fewer ranks with the highest load, so equal scores count as
      // progress.
      if (score() < best_score_ || (limits_.previous == nullptr && score() <= best_score_)) {
        best_score_ = score();
        best_ = placement_;
      }
    }
    return best_;
  }

 private:
  std::size_t expert_at(std::size_t place) const { return static_cast<std::size_t>(placement_[place]); }
  std::size_t rank_of(std::size_t place) const { return place / block_.places_per_rank; }
  std::size_t first_of(std::size_t rank) const { return rank * block_.places_per_rank; }
  double share_with(std::size_t expert, std::size_t count) const {
    return block_.load[expert] / static_cast<double>(count);
  }
  double score() const {
    return *std::max_element(load_.begin(), load_.end()) + limits_.move_cost * static_cast<double>(num_moves_);
  }

  void refresh_expert(std::size_t expert) {
    shares_[expert] = share_with(expert, counts_[expert]);
    ranks_of_[expert].clear();
    for (std::size_t rank = 0; rank < block_.num_ranks; ++rank) {
      if (on_.at(expert, rank) > 0) ranks_of_[expert].push_back(rank);
    }
  }

  void refresh_load(std::size_t rank) {
    double sum = 0;
    for (std::size_t i = 0; i < block_.places_per_rank; ++i) sum += shares_[expert_at(first_of(rank) + i)];
    load_[rank] = sum;
  }

  /// Number of arrivals added by `in` replacing `out` on a rank.
  std::int64_t moves_of(std::size_t rank, std::size_t out, std::size_t in) const {
    if (limits_.previous == nullptr) return 0;
    std::int64_t moves = 0;
    if (before_.at(in, rank) == 0 && on_.at(in, rank) == 0) ++moves;
    if (before_.at(out, rank) == 0 && on_.at(out, rank) == 1) --moves;
    return moves;
  }

  /// Keeps the step if it beats the best one so far: the largest gain, divided by the step's arrivals if these count.
  void offer(const Step& step, std::int64_t moves) {
    if (static_cast<std::int64_t>(num_moves_) + moves > 0 &&
        static_cast<std::size_t>(static_cast<std::int64_t>(num_moves_) + moves) > limits_.max_moves) {
      return;
    }
    const double merit = (load_[busiest_] - step.highest) / static_cast<double>(std::max<std::int64_t>(moves, 1));
    if (merit <= step_.merit) return;
    const double limit = step_.highest;
    step_ = step;
    step_.merit = merit;
    // If arrivals cost, a step with a higher load may still be better.
    if (limits_.previous != nullptr) step_.highest = limit;
  }

  void find_swap() {
    const std::size_t first_a = first_of(busiest_);
    for (std::size_t rank = 0; rank < block_.num_ranks; ++rank) {
      if (rank == busiest_ || load_[rank] >= step_.highest) continue;
      for (std::size_t a = first_a; a < first_a + block_.places_per_rank; ++a) {
        const std::size_t heavy = expert_at(a);
        if (on_.at(heavy, rank) > 0) continue;
        for (std::size_t b = first_of(rank); b < first_of(rank) + block_.places_per_rank; ++b) {
          const std::size_t light = expert_at(b);
          const double shift = shares_[heavy] - shares_[light];
          if (shift <= 0) continue;
          const double highest = std::max(load_[busiest_] - shift, load_[rank] + shift);
          if (highest >= step_.highest || on_.at(light, busiest_) > 0) continue;
          offer({.highest = highest, .from = a, .other = b, .swap = true},
                moves_of(busiest_, heavy, light) + moves_of(rank, light, heavy));
        }
      }
    }
  }

  void find_replacement() {
    for (std::size_t place = 0; place < placement_.size(); ++place) {
      if (counts_[expert_at(place)] < 2) continue;
      if (rank_of(place) == busiest_) {
        for (std::size_t expert = 0; expert < counts_.size(); ++expert) try_replacement(place, expert);
      } else {
        for (std::size_t i = 0; i < block_.places_per_rank; ++i) {
          try_replacement(place, expert_at(first_of(busiest_) + i));
        }
      }
    }
  }

  void try_replacement(std::size_t place, std::size_t expert) {
    const std::size_t rank = rank_of(place);
    const std::size_t out = expert_at(place);
    if (out == expert || on_.at(expert, rank) > 0) return;
    const double out_rise = share_with(out, counts_[out] - 1) - shares_[out];
    const double in_share = share_with(expert, counts_[expert] + 1);
    const double in_fall = shares_[expert] - in_share;
    const auto load_after = [&](std::size_t at) {
      double load = load_[at] + on_.at(out, at) * out_rise - on_.at(expert, at) * in_fall;
      if (at == rank) load += in_share - shares_[out] - out_rise;
      return load;
    };
    double highest = std::max(load_after(busiest_), load_after(rank));
    if (highest >= step_.highest) return;
    // On ranks that have `expert` but not `out` the load only falls.
    for (const std::size_t at : ranks_of_[out]) highest = std::max(highest, load_after(at));
    if (highest >= step_.highest) return;
    offer({.highest = highest, .from = place, .expert = expert}, moves_of(rank, out, expert));
  }

  void take_step() {
    const std::size_t rank = rank_of(step_.from);
    const std::size_t out = expert_at(step_.from);
    const std::size_t in = step_.swap ? expert_at(step_.other) : step_.expert;
    std::int64_t moves = moves_of(rank, out, in);
    if (step_.swap) moves += moves_of(rank_of(step_.other), in, out);
    num_moves_ = static_cast<std::size_t>(static_cast<std::int64_t>(num_moves_) + moves);
    put(step_.from, in);
    if (step_.swap) {
      put(step_.other, out);
    } else {
      ++counts_[in];
      --counts_[out];
    }
    touched_ = ranks_of_[in];
    touched_.insert(touched_.end(), ranks_of_[out].begin(), ranks_of_[out].end());
    touched_.push_back(rank);
    refresh_expert(in);
    refresh_expert(out);
    for (const std::size_t at : touched_) refresh_load(at);
  }

  void put(std::size_t place, std::size_t expert) {
    --on_.at(expert_at(place), rank_of(place));
    ++on_.at(expert, rank_of(place));
    placement_[place] = static_cast<std::int32_t>(expert);
  }

  const Block& block_;
  const ExchangeLimits& limits_;
  Placement placement_;
  Presence on_;
  Presence before_;
  std::vector<std::size_t> counts_;
  std::vector<double> shares_;
  std::vector<std::vector<std::size_t>> ranks_of_;
  std::vector<double> load_;
  std::vector<std::size_t> touched_;
  std::size_t busiest_ = 0;
  std::size_t num_moves_ = 0;
  double least_gain_ = 0;
  Step step_;
  Placement best_;
  double best_score_ = 0;
};

}  // namespace

std::size_t count_moves(const Block& block, const Placement& previous, const Placement& placement) {
  const Presence before(block, previous);
  const Presence after(block, placement);
  std::size_t moves = 0;
  for (std::size_t expert = 0; expert < block.load.size(); ++expert) {
    for (std::size_t rank = 0; rank < block.num_ranks; ++rank) {
      if (after.at(expert, rank) > 0 && before.at(expert, rank) == 0) ++moves;
    }
  }
  return moves;
}

Placement improve(const Block& block, Placement start, const ExchangeLimits& limits) {
  return Search(block, std::move(start), limits).run();
}

Placement kick(const Block& block, Placement placement, std::uint64_t seed) {
  constexpr int kNumSwaps = 4;
  constexpr int kNumReplacements = 2;
  constexpr int kNumTries = 64;  // some would bring replicas together and are skipped
  std::mt19937_64 random(seed);  // the standard defines its numbers
  const auto loads = rank_loads(block, placement);
  const auto busiest = static_cast<std::size_t>(std::max_element(loads.begin(), loads.end()) - loads.begin());
  Presence on(block, placement);
  std::vector<std::size_t> counts(block.load.size(), 0);
  for (const std::int32_t expert : placement) ++counts[static_cast<std::size_t>(expert)];
  const auto put = [&](std::size_t place, std::size_t expert) {
    --on.at(static_cast<std::size_t>(placement[place]), place / block.places_per_rank);
    ++on.at(expert, place / block.places_per_rank);
    placement[place] = static_cast<std::int32_t>(expert);
  };
  const bool replace = seed % 2 == 1;
  const int num_wanted = replace ? kNumReplacements : kNumSwaps;
  for (int tries = 0, done = 0; tries < kNumTries && done < num_wanted; ++tries) {
    const std::size_t rank = done == 0 ? busiest : random() % block.num_ranks;
    const std::size_t a = rank * block.places_per_rank + random() % block.places_per_rank;
    const std::size_t b = random() % placement.size();
    const std::size_t other = b / block.places_per_rank;
    const auto expert_a = static_cast<std::size_t>(placement[a]);
    const auto expert_b = static_cast<std::size_t>(placement[b]);
    if (rank == other || on.at(expert_a, other) > 0) continue;
    if (replace) {
      if (counts[expert_b] < 2) continue;
      ++counts[expert_a], --counts[expert_b];
    } else {
      if (on.at(expert_b, rank) > 0) continue;
      put(a, expert_b);
    }
    put(b, expert_a);
    ++done;
  }
  return placement;
}

}  // namespace ferry::balancing
