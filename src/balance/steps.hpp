#ifndef FERRY_BALANCE_STEPS_HPP
#define FERRY_BALANCE_STEPS_HPP

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "balance/exchange_limits.hpp"
#include "balance/homes.hpp"
#include "balance/state.hpp"

namespace ferry::balancing {

/// A candidate step: place `from` gets the expert of place `other` and, in a swap, place `other` gets that of `from`;
/// in a replacement `from` gets `expert`.
struct Step {
  double highest = 0;  ///< highest load afterwards among the ranks that the step changes
  double merit = 0;    ///< 0: no step
  std::int64_t moves = 0;
  std::size_t from = 0;
  std::size_t other = 0;
  std::size_t expert = 0;
  bool swap = false;
};

/// Finds the step that relieves the busiest rank best: the first of the best in the order of ranks and places. Steps
/// that cannot beat the best one so far are left out by bounds, most of them a rank or a place at a time.
class StepFinder {
 public:
  /// `state` and what `limits` refers to must outlive the finder.
  StepFinder(const State& state, const ExchangeLimits& limits);

  /// A step has to bring the busiest rank below `highest`.
  Step find(std::size_t busiest, double highest, std::size_t num_moves);

 private:
  /// Places of a rank whose experts were not there before.
  struct Newcomers {
    std::uint64_t version = 0;  ///< of the rank
    std::vector<std::size_t> places;
  };
  /// Load that a rank of an expert would have if the expert lost a replica elsewhere.
  struct Peak {
    double load = -1;
    std::size_t rank = 0;
  };
  /// The highest peaks of an expert: enough to leave out the busiest rank and the one that loses the replica.
  struct Peaks {
    std::int64_t search = 0;  ///< they belong to this one
    std::array<Peak, 3> highest{};
  };

  bool arrives(std::size_t expert, std::size_t rank) const;
  bool departs(std::size_t expert, std::size_t rank) const;
  std::int64_t moves_of(std::size_t rank, std::size_t out, std::size_t in) const;
  bool exceeds_moves(std::int64_t moves) const;
  bool out_of_reach(double highest) const { return highest >= reach_; }
  void offer(const Step& step);

  void find_swap();
  std::int64_t most_moves(std::size_t rank) const;
  void swap_with(std::size_t rank);
  void mark_known();
  void list_few_moves(std::size_t rank);
  bool relieves(double heavy, double light, double reach) const;
  static bool spares(double load, double heavy, double light, double reach);
  void try_window(std::size_t place, std::size_t rank, double reach);
  void try_places(std::size_t place);
  void try_swap(std::size_t a, std::size_t b);

  void find_replacement();
  void list_givers();
  bool admits_only_known(std::size_t out, std::size_t rank) const;
  void replace_on_busiest(std::size_t place);
  void replace_elsewhere(std::size_t rank, const State::Replicated& replica);
  void try_replacement(std::size_t place, std::size_t expert);
  Peak peak_of(std::size_t expert, std::size_t losing_rank);

  const State& state_;
  const ExchangeLimits& limits_;
  Homes before_;
  std::size_t busiest_ = 0;
  double top_ = 0;       ///< load of the busiest rank
  double rounding_ = 0;  ///< some bounds may be wrong by this much
  double limit_ = 0;     ///< steps have to stay below it
  double reach_ = 0;     ///< and below this to beat the best one so far
  std::size_t num_moves_ = 0;
  std::int64_t search_ = 0;
  Step step_;
  std::vector<std::size_t> known_experts_;
  std::vector<char> is_known_;  ///< of each expert, whether it is in known_experts_
  std::vector<Newcomers> newcomers_;
  std::vector<std::size_t> few_moves_;
  std::vector<std::size_t> window_;
  /// Experts of the busiest rank whose next replica relieves it enough, by place; of those, the ones with replicas on
  /// another rank, by that rank; and the ones that a rank had before, by that rank.
  std::vector<std::size_t> givers_;
  std::vector<std::vector<std::size_t>> givers_on_;
  std::vector<std::vector<std::size_t>> givers_known_to_;
  std::vector<std::size_t> ranks_with_givers_;
  double least_given_ = 0;  ///< smallest next share of the givers
  std::vector<Peaks> peaks_;
  std::vector<std::size_t> candidates_;
};

}  // namespace ferry::balancing

#endif  // FERRY_BALANCE_STEPS_HPP
