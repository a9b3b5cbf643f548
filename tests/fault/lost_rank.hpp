#ifndef FERRY_TESTS_LOST_RANK_HPP
#define FERRY_TESTS_LOST_RANK_HPP

/// Runner for tests in which one rank process fails: errors the other ranks get, and use of a group without it.

#include <cstdint>
#include <functional>
#include <memory>

#include "core/agreement.hpp"
#include "fault/trap_memory.hpp"
#include "ferry/ferry.hpp"
#include "support/bootstrap_ranks.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {

class LostRankRun {
 public:
  static constexpr int kVictim = 2;

  struct Spec {
    Fate fate = Fate::kKilled;
    Operation operation = Operation::kRoute;  ///< call in which the victim fails
    int num_ranks = 5;
    int ranks_per_node = 0;  ///< 0: all
  };
  /// Construct before the ranks are forked.
  explicit LostRankRun(const Spec& spec) : spec_(spec) {}

  SharedWords* words() const { return words_; }
  unsigned num_survivors() const { return static_cast<unsigned>(spec_.num_ranks - 1); }
  bool several_nodes() const { return spec_.ranks_per_node != 0; }

  /// Runs each rank in a new group. `victim` does not return if its fate ends the process.
  void run(const std::function<void(RankContext&, Group&)>& victim,
           const std::function<void(RankContext&, std::shared_ptr<Group>)>& survivor) const;

  /// Expects the error of this loss, with the rank named.
  void expect_named(RankContext& context, const Status& status, const char* what) const;
  /// Expects the error of the interrupted call, made at `begin_ns`: it also names the call, and was returned in time.
  void expect_interrupted(RankContext& context, const Status& status, std::int64_t begin_ns) const;
  /// Checks `later`, the status of a call after the loss, and ends the group; then the survivors form a new group
  /// without the victim and run `exchange` in it.
  void go_on_without_it(RankContext& context, std::shared_ptr<Group> group, const Status& later,
                        const std::function<Status(Group&)>& exchange) const;

 private:
  ErrorCode expected_code() const;

  Spec spec_;
  SharedWords* words_ = make_shared_words();
  Meeting meeting_ = Meeting::prepare();  // for the survivors' new group
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_LOST_RANK_HPP
