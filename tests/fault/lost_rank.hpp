#ifndef FERRY_TESTS_LOST_RANK_HPP
#define FERRY_TESTS_LOST_RANK_HPP

/// Runs tests in which one rank process fails: what the others must be told, and what they can still do.

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
    Operation operation = Operation::kRoute;  ///< in which the victim fails
    int num_ranks = 5;
    int ranks_per_node = 0;  ///< 0: all
  };
  /// Before the ranks are forked.
  explicit LostRankRun(const Spec& spec) : spec_(spec) {}

  SharedWords* words() const { return words_; }
  unsigned num_survivors() const { return static_cast<unsigned>(spec_.num_ranks - 1); }
  bool several_nodes() const { return spec_.ranks_per_node != 0; }

  /// Every rank has a new group. `victim` does not come back where the fate takes the rank away.
  void run(const std::function<void(RankContext&, Group&)>& victim,
           const std::function<void(RankContext&, std::shared_ptr<Group>)>& survivor) const;

  /// The status is the error of this loss, and names the rank.
  void expect_named(RankContext& context, const Status& status, const char* what) const;
  /// The same of the interrupted call, made at `begin_ns`: it names the call too, and took no longer than it may.
  void expect_interrupted(RankContext& context, const Status& status, std::int64_t begin_ns) const;
  /// `later` is that of another call after it. Ends the group; then the survivors form one without the victim, in which
  /// `exchange` works.
  void go_on_without_it(RankContext& context, std::shared_ptr<Group> group, const Status& later,
                        const std::function<Status(Group&)>& exchange) const;

 private:
  ErrorCode expected_code() const;

  Spec spec_;
  SharedWords* words_ = make_shared_words();
  Meeting meeting_ = Meeting::prepare();  // of the survivors' new group
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_LOST_RANK_HPP
