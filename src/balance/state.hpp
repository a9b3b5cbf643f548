#ifndef FERRY_BALANCE_STATE_HPP
#define FERRY_BALANCE_STATE_HPP

#include <cstddef>
#include <cstdint>
#include <vector>

#include "balance/block.hpp"
#include "balance/homes.hpp"

namespace ferry::balancing {

/// Placement under search with everything that is derived from it, kept up to date change by change. All of it depends
/// on the placement alone, not on the changes that led there.
class State {
 public:
  /// Place of a rank, ordered by load.
  struct Replica {
    double share = 0;
    std::size_t place = 0;
  };

  /// Place whose expert has several replicas.
  struct Replicated {
    std::size_t place = 0;
    double share = 0;
    double rise = 0;             ///< of the expert
    std::size_t other_rank = 0;  ///< one of the expert's other ranks; this one if there is none
  };

  State(const Block& block, Placement start);

  const Block& block() const { return block_; }
  const Placement& placement() const { return placement_; }
  std::size_t expert_at(std::size_t place) const { return static_cast<std::size_t>(placement_[place]); }
  std::size_t rank_of(std::size_t place) const { return place / block_.places_per_rank; }
  std::size_t first_of(std::size_t rank) const { return rank * block_.places_per_rank; }
  std::size_t end_of(std::size_t rank) const { return first_of(rank) + block_.places_per_rank; }

  std::size_t count(std::size_t expert) const { return counts_[expert]; }
  std::int32_t on(std::size_t expert, std::size_t rank) const { return homes_.at(expert, rank); }
  const std::vector<Homes::Home>& homes(std::size_t expert) const { return homes_.of(expert); }

  /// Load of each replica of an expert.
  double share(std::size_t expert) const { return shares_[expert]; }
  /// The same with one replica more.
  double next_share(std::size_t expert) const { return next_shares_[expert]; }
  /// Rise of an expert's share if it loses one of its replicas, of which it has several.
  double rise(std::size_t expert) const { return rises_[expert]; }
  double load(std::size_t rank) const { return loads_[rank]; }
  std::size_t busiest() const;
  /// Changes with the places of a rank.
  std::uint64_t version(std::size_t rank) const { return lists_[rank].version; }

  /// Places of a rank by ascending share. Valid until the next change.
  const std::vector<Replica>& by_share(std::size_t rank) const;
  /// By ascending place. Valid until the next change.
  const std::vector<Replicated>& replicated(std::size_t rank) const;

  /// Gives a place to another expert. Shares and loads follow with settle().
  void put(std::size_t place, std::size_t expert);
  void settle();
  /// Number of changes so far, for undo_to().
  std::size_t num_changes() const { return changes_.size(); }
  /// Takes back the changes since that number of them.
  void undo_to(std::size_t num_changes);

 private:
  struct Change {
    std::size_t place = 0;
    std::size_t before = 0;
  };
  /// Lists that are made when they are asked for.
  struct RankLists {
    std::vector<Replica> by_share;
    std::vector<Replicated> replicated;
    std::uint64_t version = 0;
    bool is_sorted = false;
    bool is_listed = false;
  };

  double share_with(std::size_t expert, std::size_t count) const {
    return block_.load[expert] / static_cast<double>(count);
  }
  void exchange(std::size_t place, std::size_t expert);
  void refresh_expert(std::size_t expert);
  void refresh_rank(std::size_t rank);

  const Block& block_;
  Placement placement_;
  Homes homes_;
  std::vector<std::size_t> counts_;
  std::vector<std::size_t> settled_counts_;  ///< counts_ when shares_ was computed
  std::vector<double> shares_;
  std::vector<double> next_shares_;
  std::vector<double> rises_;
  std::vector<double> loads_;
  mutable std::vector<RankLists> lists_;
  std::vector<Change> changes_;
  std::vector<std::size_t> touched_experts_;
  std::vector<std::size_t> touched_ranks_;
};

}  // namespace ferry::balancing

#endif  // FERRY_BALANCE_STATE_HPP
