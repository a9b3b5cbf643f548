#include "balance/exchange.hpp"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <random>
#include <utility>

#include "balance/state.hpp"
#include "balance/steps.hpp"

namespace ferry::balancing {
namespace {

/// Smallest gain, in mean loads; smaller ones are rounding errors of the sums.
constexpr double kLeastGain = 1e-9;

class Search {
 public:
  Search(const Block& block, Placement start, const ExchangeLimits& limits)
      : block_(block), limits_(limits), state_(block, std::move(start)), finder_(state_, limits) {
    const double total = std::accumulate(block.load.begin(), block.load.end(), 0.0);
    least_gain_ = kLeastGain * total / static_cast<double>(block.num_ranks);
    if (limits.previous != nullptr) num_moves_ = count_moves(block, *limits.previous, state_.placement());
  }

  Placement run() {
    climb();
    double highest = highest_load();
    for (int round = 0; round < limits_.num_kicks && highest > limits_.good && limits_.max_steps > 0; ++round) {
      if (is_interrupted()) break;
      const std::size_t best = state_.num_changes();
      kick(static_cast<std::uint64_t>(round));
      climb();
      if (highest_load() < highest) {
        highest = highest_load();
      } else {
        state_.undo_to(best);
      }
    }
    return state_.placement();
  }

 private:
  double highest_load() const { return state_.load(state_.busiest()); }
  double score() const { return highest_load() + limits_.move_cost * static_cast<double>(num_moves_); }
  bool is_interrupted() const { return limits_.interruption != nullptr && limits_.interruption->asked(); }

  /// Takes steps, then goes back to the best placement on the way.
  void climb() {
    std::size_t best = state_.num_changes();
    double best_score = score();
    for (int step = 0; step < limits_.max_steps && !is_interrupted(); ++step) {
      const std::size_t busiest = state_.busiest();
      if (state_.load(busiest) <= limits_.enough) break;
      const Step found = finder_.find(busiest, state_.load(busiest) - least_gain_, num_moves_);
      if (found.merit <= 0) break;
      take(found);
      // If arrivals cost nothing, each step leaves fewer ranks with the highest load, so equal scores count as
      // progress.
      const double reached = score();
      if (reached < best_score || (limits_.previous == nullptr && reached <= best_score)) {
        best_score = reached;
        best = state_.num_changes();
      }
    }
    state_.undo_to(best);
  }

  void take(const Step& step) {
    const std::size_t out = state_.expert_at(step.from);
    const std::size_t in = step.swap ? state_.expert_at(step.other) : step.expert;
    num_moves_ = static_cast<std::size_t>(static_cast<std::int64_t>(num_moves_) + step.moves);
    state_.put(step.from, in);
    if (step.swap) state_.put(step.other, out);
    state_.settle();
  }

  void kick(std::uint64_t seed) {
    constexpr int kNumSwaps = 4;
    constexpr int kNumReplacements = 2;
    constexpr int kNumTries = 64;  // some would bring replicas together and are skipped
    std::mt19937_64 random(seed);  // the standard defines its numbers
    const std::size_t busiest = state_.busiest();
    const bool replace = seed % 2 == 1;
    const int num_wanted = replace ? kNumReplacements : kNumSwaps;
    for (int tries = 0, done = 0; tries < kNumTries && done < num_wanted; ++tries) {
      const std::size_t rank = done == 0 ? busiest : random() % block_.num_ranks;
      const std::size_t a = state_.first_of(rank) + random() % block_.places_per_rank;
      const std::size_t b = random() % block_.num_places();
      const std::size_t other = state_.rank_of(b);
      const std::size_t expert_a = state_.expert_at(a);
      const std::size_t expert_b = state_.expert_at(b);
      if (rank == other || state_.on(expert_a, other) > 0) continue;
      if (replace) {
        if (state_.count(expert_b) < 2) continue;
      } else {
        if (state_.on(expert_b, rank) > 0) continue;
        state_.put(a, expert_b);
      }
      state_.put(b, expert_a);
      ++done;
    }
    state_.settle();
  }

  const Block& block_;
  const ExchangeLimits& limits_;
  State state_;
  StepFinder finder_;
  std::size_t num_moves_ = 0;
  double least_gain_ = 0;
};

/// Experts of a rank, ascending, each once; without empty places.
Placement experts_on(const Block& block, const Placement& placement, std::size_t rank) {
  const auto first = placement.begin() + static_cast<std::ptrdiff_t>(rank * block.places_per_rank);
  Placement experts(first, first + static_cast<std::ptrdiff_t>(block.places_per_rank));
  std::sort(experts.begin(), experts.end());
  experts.erase(std::unique(experts.begin(), experts.end()), experts.end());
  if (!experts.empty() && experts.front() < 0) experts.erase(experts.begin());
  return experts;
}

}  // namespace

std::size_t count_moves(const Block& block, const Placement& previous, const Placement& placement) {
  std::size_t moves = 0;
  Placement arrived;
  for (std::size_t rank = 0; rank < block.num_ranks; ++rank) {
    const Placement before = experts_on(block, previous, rank);
    const Placement after = experts_on(block, placement, rank);
    arrived.clear();
    std::set_difference(after.begin(), after.end(), before.begin(), before.end(), std::back_inserter(arrived));
    moves += arrived.size();
  }
  return moves;
}

Placement improve(const Block& block, Placement start, const ExchangeLimits& limits) {
  return Search(block, std::move(start), limits).run();
}

}  // namespace ferry::balancing
