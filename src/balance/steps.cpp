#include "balance/steps.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace ferry::balancing {
namespace {

/// Rounding errors of bounds that are sums in another order than the loads that they bound, in units of the highest
/// load: a few units in the last of 53 bits.
constexpr double kRounding = 1e-12;
/// A window with more than this part of a rank's places is not worth sorting.
constexpr std::size_t kWideWindow = 4;

}  // namespace

StepFinder::StepFinder(const State& state, const ExchangeLimits& limits)
    : state_(state),
      limits_(limits),
      before_(state.block(), limits.previous != nullptr ? *limits.previous : Placement()),
      is_known_(state.block().load.size(), 0),
      newcomers_(state.block().num_ranks),
      givers_on_(state.block().num_ranks),
      givers_known_to_(state.block().num_ranks),
      peaks_(state.block().load.size()) {}

Step StepFinder::find(std::size_t busiest, double highest, std::size_t num_moves) {
  ++search_;
  busiest_ = busiest;
  top_ = state_.load(busiest);
  rounding_ = kRounding * top_;
  num_moves_ = num_moves;
  step_ = Step{};
  limit_ = highest;
  reach_ = highest;
  if (limits_.previous != nullptr) mark_known();
  find_swap();
  find_replacement();
  return step_;
}

/// True if the expert would be new on the rank.
bool StepFinder::arrives(std::size_t expert, std::size_t rank) const {
  return before_.at(expert, rank) == 0 && state_.on(expert, rank) == 0;
}

/// True if the loss of one replica of the expert takes back its arrival on the rank.
bool StepFinder::departs(std::size_t expert, std::size_t rank) const {
  return before_.at(expert, rank) == 0 && state_.on(expert, rank) == 1;
}

/// Number of arrivals added by `in` replacing `out` on a rank.
std::int64_t StepFinder::moves_of(std::size_t rank, std::size_t out, std::size_t in) const {
  if (limits_.previous == nullptr) return 0;
  return (arrives(in, rank) ? 1 : 0) - (departs(out, rank) ? 1 : 0);
}

bool StepFinder::exceeds_moves(std::int64_t moves) const {
  const std::int64_t total = static_cast<std::int64_t>(num_moves_) + moves;
  return total > 0 && static_cast<std::size_t>(total) > limits_.max_moves;
}

/// Keeps the step if it beats the best one so far: the largest gain, divided by the step's arrivals if these count.
void StepFinder::offer(const Step& step) {
  if (exceeds_moves(step.moves)) return;
  const double merit = (top_ - step.highest) / static_cast<double>(std::max<std::int64_t>(step.moves, 1));
  if (merit <= step_.merit) return;
  step_ = step;
  step_.merit = merit;
  // If arrivals count, a step with a higher load may still be better, unless even one arrival would be too many.
  reach_ = limits_.previous == nullptr ? step.highest : std::min(limit_, top_ - merit + rounding_);
}

void StepFinder::find_swap() {
  for (std::size_t rank = 0; rank < state_.block().num_ranks; ++rank) {
    // No swap brings both ranks below their mean, not even by rounding.
    if (rank != busiest_ && !out_of_reach((top_ + state_.load(rank)) / 2)) swap_with(rank);
  }
}

/// Most arrivals of a swap with the rank that may still be the best step.
std::int64_t StepFinder::most_moves(std::size_t rank) const {
  constexpr std::int64_t kMost = 2;
  if (limits_.previous == nullptr) return kMost;
  const double most_gain = (top_ - state_.load(rank)) / 2 + rounding_;
  std::int64_t moves = kMost;
  while (moves >= -kMost &&
         (exceeds_moves(moves) || most_gain / static_cast<double>(std::max<std::int64_t>(moves, 1)) <= step_.merit)) {
    --moves;
  }
  return moves;
}

void StepFinder::swap_with(std::size_t rank) {
  const auto& by_share = state_.by_share(rank);
  const std::int64_t most = most_moves(rank);
  bool has_few_moves = false;
  for (std::size_t a = state_.first_of(busiest_); a < state_.end_of(busiest_); ++a) {
    const std::size_t heavy = state_.expert_at(a);
    const double share = state_.share(heavy);
    if (!relieves(share, by_share.front().share, reach_) ||
        !spares(state_.load(rank), share, by_share.back().share, reach_) || state_.on(heavy, rank) > 0) {
      continue;
    }
    if (limits_.previous == nullptr) {
      try_window(a, rank, reach_);
      continue;
    }
    const std::int64_t moves = (arrives(heavy, rank) ? 1 : 0) - (departs(heavy, busiest_) ? 1 : 0);
    if (moves - 1 > most) continue;
    if (!has_few_moves) list_few_moves(rank);
    has_few_moves = true;
    window_ = few_moves_;
    // The other places add one arrival.
    if (moves + 1 <= most) {
      const auto divisor = static_cast<double>(std::max<std::int64_t>(moves + 1, 1));
      try_window(a, rank, std::min(reach_, top_ - divisor * step_.merit + rounding_));
    } else {
      try_places(a);
    }
  }
}

/// True if the busiest rank gets below `reach` when it gives a replica of `heavy` load for one of `light`.
bool StepFinder::relieves(double heavy, double light, double reach) const {
  const double shift = heavy - light;
  return shift > 0 && top_ - shift < reach;
}

/// True if the other rank stays below `reach` in that.
bool StepFinder::spares(double load, double heavy, double light, double reach) {
  return load + (heavy - light) < reach;
}

/// Marks the experts that add no arrival if they go to the busiest rank.
void StepFinder::mark_known() {
  for (const std::size_t expert : known_experts_) is_known_[expert] = 0;
  known_experts_.clear();
  for (std::size_t place = state_.first_of(busiest_); place < state_.end_of(busiest_); ++place) {
    known_experts_.push_back(state_.expert_at(place));
    if ((*limits_.previous)[place] >= 0) known_experts_.push_back(static_cast<std::size_t>((*limits_.previous)[place]));
  }
  for (const std::size_t expert : known_experts_) is_known_[expert] = 1;
}

/// Lists the places of a rank whose experts add no arrival if they go to the busiest rank, or take one back if they
/// leave.
void StepFinder::list_few_moves(std::size_t rank) {
  Newcomers& newcomers = newcomers_[rank];
  if (newcomers.version != state_.version(rank)) {
    newcomers = {state_.version(rank), {}};
    for (std::size_t place = state_.first_of(rank); place < state_.end_of(rank); ++place) {
      if (departs(state_.expert_at(place), rank)) newcomers.places.push_back(place);
    }
  }
  few_moves_ = newcomers.places;
  for (std::size_t place = state_.first_of(rank); place < state_.end_of(rank); ++place) {
    if (is_known_[state_.expert_at(place)] != 0) few_moves_.push_back(place);
  }
  std::sort(few_moves_.begin(), few_moves_.end());
}

/// Tries those places of a rank whose share is right for a swap with `place`, and those in window_.
void StepFinder::try_window(std::size_t place, std::size_t rank, double reach) {
  const auto& by_share = state_.by_share(rank);
  const double share = state_.share(state_.expert_at(place));
  const auto first = std::partition_point(by_share.begin(), by_share.end(), [&](const State::Replica& at) {
    return !spares(state_.load(rank), share, at.share, reach);
  });
  const auto last = std::partition_point(first, by_share.end(),
                                         [&](const State::Replica& at) { return relieves(share, at.share, reach); });
  if (static_cast<std::size_t>(last - first) > by_share.size() / kWideWindow) {
    window_.clear();
    for (std::size_t b = state_.first_of(rank); b < state_.end_of(rank); ++b) try_swap(place, b);
    return;
  }
  for (auto at = first; at != last; ++at) window_.push_back(at->place);
  std::sort(window_.begin(), window_.end());
  try_places(place);
}

/// Tries the places in window_, and empties it.
void StepFinder::try_places(std::size_t place) {
  for (const std::size_t b : window_) try_swap(place, b);
  window_.clear();
}

void StepFinder::try_swap(std::size_t a, std::size_t b) {
  const std::size_t heavy = state_.expert_at(a);
  const std::size_t light = state_.expert_at(b);
  const std::size_t rank = state_.rank_of(b);
  const double shift = state_.share(heavy) - state_.share(light);
  if (shift <= 0) return;
  const double highest = std::max(top_ - shift, state_.load(rank) + shift);
  if (highest >= reach_ || state_.on(light, busiest_) > 0) return;
  offer({.highest = highest,
         .moves = moves_of(busiest_, heavy, light) + moves_of(rank, light, heavy),
         .from = a,
         .other = b,
         .swap = true});
}

void StepFinder::find_replacement() {
  list_givers();
  for (std::size_t rank = 0; rank < state_.block().num_ranks; ++rank) {
    for (const State::Replicated& replica : state_.replicated(rank)) {
      if (rank == busiest_) {
        replace_on_busiest(replica.place);
      } else {
        replace_elsewhere(rank, replica);
      }
    }
  }
}

void StepFinder::list_givers() {
  givers_.clear();
  for (const std::size_t rank : ranks_with_givers_) {
    givers_on_[rank].clear();
    givers_known_to_[rank].clear();
  }
  ranks_with_givers_.clear();
  least_given_ = std::numeric_limits<double>::infinity();
  for (std::size_t place = state_.first_of(busiest_); place < state_.end_of(busiest_); ++place) {
    const std::size_t expert = state_.expert_at(place);
    const double fall = state_.share(expert) - state_.next_share(expert);
    if (out_of_reach(top_ - state_.on(expert, busiest_) * fall)) continue;
    givers_.push_back(expert);
    least_given_ = std::min(least_given_, state_.next_share(expert));
    for (const Homes::Home& home : state_.homes(expert)) {
      if (home.rank == busiest_) continue;
      givers_on_[home.rank].push_back(expert);
      ranks_with_givers_.push_back(home.rank);
    }
    for (const Homes::Home& home : before_.of(expert)) {
      givers_known_to_[home.rank].push_back(expert);
      ranks_with_givers_.push_back(home.rank);
    }
  }
}

/// True if no arrival is left for an expert that takes the place of `out`.
bool StepFinder::admits_only_known(std::size_t out, std::size_t rank) const {
  return limits_.previous != nullptr && exceeds_moves(1) && !departs(out, rank);
}

/// Tries all experts in the place, which is on the busiest rank.
void StepFinder::replace_on_busiest(std::size_t place) {
  const std::size_t out = state_.expert_at(place);
  if (admits_only_known(out, busiest_)) {
    std::sort(known_experts_.begin(), known_experts_.end());
    for (const std::size_t expert : known_experts_) try_replacement(place, expert);
    return;
  }
  const double kept = top_ + (state_.on(out, busiest_) - 1) * state_.rise(out) - state_.share(out);
  const Peak peak = peak_of(out, busiest_);
  std::size_t expert = 0;
  for (; expert < state_.block().load.size() && !out_of_reach(peak.load); ++expert) {
    if (!out_of_reach(kept + state_.next_share(expert) - rounding_)) try_replacement(place, expert);
  }
  if (expert == state_.block().load.size()) return;
  // Only experts of the peak's rank lower it.
  candidates_.clear();
  for (std::size_t at = state_.first_of(peak.rank); at < state_.end_of(peak.rank); ++at) {
    if (state_.expert_at(at) >= expert) candidates_.push_back(state_.expert_at(at));
  }
  std::sort(candidates_.begin(), candidates_.end());
  for (const std::size_t candidate : candidates_) try_replacement(place, candidate);
}

/// Tries the experts of the busiest rank in the place, which is on another rank.
void StepFinder::replace_elsewhere(std::size_t rank, const State::Replicated& replica) {
  if (out_of_reach(state_.load(rank) + least_given_ - replica.share - rounding_)) return;
  // Most replicas fail here: what another rank of the expert gets is too much, unless it has the giver too.
  const std::size_t other = replica.other_rank;
  if (other != rank && other != busiest_ && givers_on_[other].empty() &&
      out_of_reach(state_.load(other) + replica.rise)) {
    return;
  }
  const std::size_t out = state_.expert_at(replica.place);
  if (admits_only_known(out, rank)) {
    for (const std::size_t expert : givers_known_to_[rank]) try_replacement(replica.place, expert);
    return;
  }
  const Peak peak = peak_of(out, rank);
  for (const std::size_t expert : out_of_reach(peak.load) ? givers_on_[peak.rank] : givers_) {
    try_replacement(replica.place, expert);
  }
}

void StepFinder::try_replacement(std::size_t place, std::size_t expert) {
  const std::size_t rank = state_.rank_of(place);
  const std::size_t out = state_.expert_at(place);
  if (out == expert || state_.on(expert, rank) > 0) return;
  const double out_rise = state_.rise(out);
  const double in_share = state_.next_share(expert);
  const double in_fall = state_.share(expert) - in_share;
  const auto load_after = [&](std::size_t at) {
    double load = state_.load(at) + state_.on(out, at) * out_rise - state_.on(expert, at) * in_fall;
    if (at == rank) load += in_share - state_.share(out) - out_rise;
    return load;
  };
  double highest = std::max(load_after(busiest_), load_after(rank));
  if (highest >= reach_) return;
  // On ranks that have `expert` but not `out` the load only falls.
  for (const Homes::Home& home : state_.homes(out)) {
    highest = std::max(highest, load_after(home.rank));
    if (highest >= reach_) return;
  }
  offer({.highest = highest, .moves = moves_of(rank, out, expert), .from = place, .expert = expert});
}

/// Highest load among the ranks of an expert if it loses a replica on `losing_rank`, without that rank and the busiest.
StepFinder::Peak StepFinder::peak_of(std::size_t expert, std::size_t losing_rank) {
  Peaks& peaks = peaks_[expert];
  if (peaks.search != search_) {
    peaks = {search_, {}};
    for (const Homes::Home& home : state_.homes(expert)) {
      Peak peak{state_.load(home.rank) + home.count * state_.rise(expert), home.rank};
      for (Peak& higher : peaks.highest) {
        if (peak.load > higher.load) std::swap(peak, higher);
      }
    }
  }
  for (const Peak& peak : peaks.highest) {
    if (peak.rank != losing_rank && peak.rank != busiest_) return peak;
  }
  return {};
}

}  // namespace ferry::balancing
