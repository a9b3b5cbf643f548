#include "balance/state.hpp"

#include <algorithm>
#include <utility>

namespace ferry::balancing {
namespace {

void sort_unique(std::vector<std::size_t>* values) {
  std::sort(values->begin(), values->end());
  values->erase(std::unique(values->begin(), values->end()), values->end());
}

}  // namespace

State::State(const Block& block, Placement start)
    : block_(block),
      placement_(std::move(start)),
      homes_(block, placement_),
      counts_(block.load.size(), 0),
      settled_counts_(block.load.size(), 0),
      shares_(block.load.size(), 0.0),
      next_shares_(block.load.size(), 0.0),
      rises_(block.load.size(), 0.0),
      loads_(block.num_ranks, 0.0),
      lists_(block.num_ranks) {
  for (const std::int32_t expert : placement_) ++counts_[static_cast<std::size_t>(expert)];
  for (std::size_t expert = 0; expert < counts_.size(); ++expert) refresh_expert(expert);
  for (std::size_t rank = 0; rank < loads_.size(); ++rank) refresh_rank(rank);
}

std::size_t State::busiest() const {
  return static_cast<std::size_t>(std::max_element(loads_.begin(), loads_.end()) - loads_.begin());
}

const std::vector<State::Replica>& State::by_share(std::size_t rank) const {
  RankLists& lists = lists_[rank];
  if (lists.is_sorted) return lists.by_share;
  lists.by_share.clear();
  for (std::size_t place = first_of(rank); place < end_of(rank); ++place) {
    lists.by_share.push_back({shares_[expert_at(place)], place});
  }
  std::sort(lists.by_share.begin(), lists.by_share.end(),
            [](const Replica& a, const Replica& b) { return a.share < b.share; });
  lists.is_sorted = true;
  return lists.by_share;
}

const std::vector<State::Replicated>& State::replicated(std::size_t rank) const {
  RankLists& lists = lists_[rank];
  if (lists.is_listed) return lists.replicated;
  lists.replicated.clear();
  for (std::size_t place = first_of(rank); place < end_of(rank); ++place) {
    const std::size_t expert = expert_at(place);
    if (counts_[expert] < 2) continue;
    const auto& homes = homes_.of(expert);
    const std::size_t other = homes.front().rank == rank ? homes.back().rank : homes.front().rank;
    lists.replicated.push_back({place, shares_[expert], rises_[expert], other});
  }
  lists.is_listed = true;
  return lists.replicated;
}

void State::put(std::size_t place, std::size_t expert) {
  changes_.push_back({place, expert_at(place)});
  exchange(place, expert);
}

void State::exchange(std::size_t place, std::size_t expert) {
  const std::size_t out = expert_at(place);
  const std::size_t rank = rank_of(place);
  homes_.remove(out, rank);
  homes_.add(expert, rank);
  --counts_[out];
  ++counts_[expert];
  placement_[place] = static_cast<std::int32_t>(expert);
  touched_experts_.push_back(out);
  touched_experts_.push_back(expert);
  touched_ranks_.push_back(rank);
}

void State::settle() {
  sort_unique(&touched_experts_);
  for (const std::size_t expert : touched_experts_) {
    const bool is_lighter_or_heavier = counts_[expert] != settled_counts_[expert];
    if (is_lighter_or_heavier) refresh_expert(expert);
    for (const Homes::Home& home : homes_.of(expert)) {
      lists_[home.rank].is_listed = false;
      if (is_lighter_or_heavier) touched_ranks_.push_back(home.rank);
    }
  }
  sort_unique(&touched_ranks_);
  for (const std::size_t rank : touched_ranks_) refresh_rank(rank);
  touched_experts_.clear();
  touched_ranks_.clear();
}

void State::undo_to(std::size_t num_changes) {
  while (changes_.size() > num_changes) {
    const Change change = changes_.back();
    changes_.pop_back();
    exchange(change.place, change.before);
  }
  settle();
}

void State::refresh_expert(std::size_t expert) {
  shares_[expert] = share_with(expert, counts_[expert]);
  next_shares_[expert] = share_with(expert, counts_[expert] + 1);
  rises_[expert] = counts_[expert] > 1 ? share_with(expert, counts_[expert] - 1) - shares_[expert] : 0;
  settled_counts_[expert] = counts_[expert];
}

/// Sums in the order of places, so that the load depends on the placement to the last bit.
void State::refresh_rank(std::size_t rank) {
  double sum = 0;
  for (std::size_t place = first_of(rank); place < end_of(rank); ++place) sum += shares_[expert_at(place)];
  loads_[rank] = sum;
  ++lists_[rank].version;
  lists_[rank].is_sorted = false;
  lists_[rank].is_listed = false;
}

}  // namespace ferry::balancing
