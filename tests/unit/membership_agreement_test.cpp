/// The agreement on views, in all orders of its events: small worlds of members whose messages are delivered, whose
/// processes end and whose silence is suspected at every moment at which that is possible.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "membership/agreement.hpp"
#include "membership/messages.hpp"
#include "support/sanitizers.hpp"

namespace ferry::membership {

/// Text of all that an Agreement remembers.
struct AgreementState {
  static std::string of(const Agreement& agreement) {
    std::string text;
    const auto add = [&text](const auto& value) { text.append(std::to_string(value)).push_back(','); };
    const auto add_content = [&text](const Content& content) {
      const std::vector<std::byte> bytes = encode({}, content);
      text.append(reinterpret_cast<const char*>(bytes.data()), bytes.size()).push_back(';');
    };
    for (const auto& [id, gone] : agreement.gone_) add(static_cast<int>(gone));
    add(agreement.followed_);
    add(agreement.heeds_accusations_);
    for (const auto& [id, report] : agreement.reports_) {
      add(id);
      add_content(report);
    }
    add(agreement.memory_.promised.round);
    add(agreement.memory_.promised.coordinator);
    add_content(Promise{{}, agreement.memory_.lock});
    add(static_cast<int>(agreement.phase_));
    add(agreement.ballot_.round);
    add(agreement.latest_round_);
    add_content(Decision{agreement.proposed_});
    for (const auto& [id, voter] : agreement.voters_) {
      add(voter.has_answered ? id : -1 - id);
      add_content(Promise{{}, voter.lock});
    }
    if (agreement.decided_) add_content(Decision{*agreement.decided_});
    return text;
  }
};

namespace {

View first_view(int num_members) {
  View view;
  for (Id id = 0; id < num_members; ++id) view.members.push_back({id, "h", static_cast<std::uint16_t>(100 + id), 0});
  return view;
}

/// Faults that a world may still have.
struct Budget {
  int num_deaths = 0;
  int num_suspicions = 0;  ///< a member holds a living one for silent
  int num_retries = 0;     ///< a member gives up and begins another attempt
};

/// Member that a group's timeout has named to another one.
struct Accusation {
  Id by = 0;
  Id accused = 0;
};

/// Members, and the connections between them. A connection belongs to a follower and its coordinator; it ends when the
/// follower turns to another coordinator, or when one of them dies.
class World {
 public:
  World(int num_members, Budget budget, const std::vector<Accusation>& accusations) : budget_(budget) {
    for (Id id = 0; id < num_members; ++id) {
      Report report;
      report.num_complete_steps = static_cast<std::uint64_t>(7 + id);
      for (const Accusation& accusation : accusations) {
        if (accusation.by == id) report.accused.push_back(accusation.accused);
      }
      heeds_.push_back(accusations.empty());
      reports_.push_back(report);
      members_.emplace_back(first_view(num_members), id, report, AgreementMemory{});
      alive_.push_back(true);
      followed_.push_back(-1);
    }
    for (Id id = 0; id < num_members; ++id) settle(id);
  }

  /// Calls `visit` with each world that one event makes of this one.
  template <typename Visit>
  void for_each_next(Visit visit) const {
    for (const auto& [ends, queue] : queues_) {
      if (queue.empty() || !alive_[at(ends.second)]) continue;
      World next = *this;
      next.deliver(ends.first, ends.second);
      visit(std::move(next));
    }
    for (Id id = 0; id < size(); ++id) {
      if (!alive_[at(id)]) continue;
      if (budget_.num_deaths > 0) {
        World next = *this;
        --next.budget_.num_deaths;
        next.alive_[at(id)] = false;
        visit(std::move(next));
      }
      if (members_[at(id)].decided()) continue;
      if (budget_.num_retries > 0) {
        World next = *this;
        --next.budget_.num_retries;
        next.retry(id);
        visit(std::move(next));
      }
      if (!heeds_[at(id)]) {
        World next = *this;
        next.heeds_[at(id)] = true;
        next.members_[at(id)].heed_accusations(false);
        next.settle(id);
        visit(std::move(next));
      }
      for (Id other = 0; other < size(); ++other) {
        if (other != id) visit_suspicions(id, other, visit);
      }
    }
  }

  std::string state() const {
    std::string text;
    for (const Agreement& member : members_) text.append(AgreementState::of(member)).push_back('|');
    for (const auto& [ends, queue] : queues_) {
      text.append(std::to_string(ends.first)).append(">").append(std::to_string(ends.second));
      for (const std::optional<Message>& message : queue) {
        text.push_back('<');
        if (!message) continue;
        const std::vector<std::byte> bytes = std::visit([](const auto& part) { return encode({}, part); }, *message);
        text.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      }
    }
    for (const bool is_alive : alive_) text.push_back(is_alive ? 'a' : 'd');
    for (const Id id : followed_) text.append(std::to_string(id));
    return text.append(fmt::format("{} {} {}", budget_.num_deaths, budget_.num_suspicions, budget_.num_retries));
  }

  /// Views that living members have decided agree.
  void expect_agreement() const {
    const View* decided = nullptr;
    for (Id id = 0; id < size(); ++id) {
      const Agreement& member = members_[at(id)];
      if (!alive_[at(id)] || !member.decided()) continue;
      if (decided == nullptr) decided = &*member.decided();
      ASSERT_EQ(*decided, *member.decided());
    }
  }

  /// Nothing can happen any more: all members that live have decided, and are in the view.
  void expect_all_decided() const {
    for (Id id = 0; id < size(); ++id) {
      if (!alive_[at(id)]) continue;
      const Agreement& member = members_[at(id)];
      ASSERT_TRUE(member.decided().has_value()) << "member " << id;
      ASSERT_NE(member.decided()->find(id), nullptr) << "member " << id;
      ASSERT_EQ(member.decided()->epoch, 1U);
    }
  }
  /// As expect_all_decided in worlds with suspicions, in which living members may be left out, or be so divided that a
  /// coordinator lacks a quorum; others then wait for each other until their time is over.
  void expect_decided_or_without_quorum() const {
    bool is_undecided = false;
    bool lacks_quorum = false;
    for (Id id = 0; id < size(); ++id) {
      const Agreement& member = members_[at(id)];
      if (!alive_[at(id)] || member.decided()) continue;
      is_undecided = true;
      lacks_quorum = lacks_quorum || member.lacks_quorum();
    }
    ASSERT_TRUE(!is_undecided || lacks_quorum);
  }

 private:
  static std::size_t at(Id id) { return static_cast<std::size_t>(id); }
  Id size() const { return static_cast<Id>(members_.size()); }

  template <typename Visit>
  void visit_suspicions(Id id, Id other, Visit& visit) const {
    World next = *this;
    const bool is_alive = alive_[at(other)];
    if (is_alive && members_[at(other)].decided()) {
      // A member that is a view behind asks others, and those that are further answer.
      next.members_[at(id)].receive(other, Decision{*members_[at(other)].decided()});
    } else if (!is_alive) {
      next.members_[at(id)].note_dead(other);
    } else if (members_[at(id)].coordinates() && members_[at(other)].followed() > id) {
      // It has given up on this coordinator, and will never report to it.
      next.members_[at(id)].note_silent(other);
    } else if (budget_.num_suspicions > 0) {
      --next.budget_.num_suspicions;
      next.members_[at(id)].note_silent(other);
    } else {
      return;
    }
    next.settle(id);
    visit(std::move(next));
  }

  void deliver(Id from, Id to) {
    std::deque<std::optional<Message>>& queue = queues_[{from, to}];
    const std::optional<Message> message = std::move(queue.front());
    queue.pop_front();
    if (message) {
      members_[at(to)].receive(from, *message);
    } else if (alive_[at(from)]) {
      members_[at(to)].note_departed(from);
    } else {
      members_[at(to)].note_dead(from);
    }
    settle(to);
  }

  /// A member begins again, with what it has promised. Its followers lose their connections and report again.
  void retry(Id id) {
    const Id before = std::exchange(followed_[at(id)], -1);
    if (before != id) {
      queues_[{id, before}].emplace_back(std::nullopt);
      queues_[{before, id}].clear();
    }
    for (Id other = 0; other < size(); ++other) {
      if (other == id || followed_[at(other)] != id || members_[at(other)].decided()) continue;
      queues_[{id, other}].clear();
      queues_[{other, id}].clear();
      queues_[{other, id}].emplace_back(reports_[at(other)]);
      if (!alive_[at(other)]) queues_[{other, id}].emplace_back(std::nullopt);
    }
    members_[at(id)] = Agreement(first_view(size()), id, reports_[at(id)], members_[at(id)].memory());
    settle(id);
  }

  /// Sends what a member has to send, and closes the connection to a coordinator that it has left.
  void settle(Id id) {
    Agreement& member = members_[at(id)];
    if (followed_[at(id)] != member.followed()) {
      const Id before = std::exchange(followed_[at(id)], member.followed());
      if (before >= 0 && before != id) {
        queues_[{id, before}].emplace_back(std::nullopt);
        queues_[{before, id}].clear();
      }
    }
    for (Agreement::Outgoing& outgoing : member.take_outgoing()) {
      // Between a follower and a coordinator that it has left there is no connection.
      const bool follows = followed_[at(id)] == outgoing.to;
      if (follows || followed_[at(outgoing.to)] == id) queues_[{id, outgoing.to}].emplace_back(outgoing.message);
    }
  }

  Budget budget_;
  std::vector<Report> reports_;
  std::vector<Agreement> members_;
  std::vector<bool> alive_;
  std::vector<bool> heeds_;  // by member: has the time for accused members to come passed
  std::vector<Id> followed_;
  std::map<std::pair<Id, Id>, std::deque<std::optional<Message>>> queues_;  // empty message: the connection's end
};

/// Visits every world that can come of `first`. Returns their number.
template <typename Check, typename CheckEnd>
std::size_t explore(World first, Check check, CheckEnd check_end) {
  std::unordered_set<std::size_t> seen;  // hashes: a collision in millions of 64-bit values is improbable
  std::vector<World> open;
  open.push_back(std::move(first));
  seen.insert(std::hash<std::string>()(open.back().state()));
  while (!open.empty() && !::testing::Test::HasFatalFailure()) {
    const World world = std::move(open.back());
    open.pop_back();
    check(world);
    bool is_end = true;
    world.for_each_next([&](World next) {
      const std::string state = next.state();
      is_end = is_end && state == world.state();
      if (seen.insert(std::hash<std::string>()(state)).second) open.push_back(std::move(next));
    });
    if (is_end) check_end(world);
  }
  return seen.size();
}

struct WorldCase {
  int num_members;
  Budget budget;
  std::vector<Accusation> accusations{};
};

std::string name_of(const ::testing::TestParamInfo<WorldCase>& info) {
  const auto& [num_members, budget, accusations] = info.param;
  std::string name = fmt::format("Of{}With{}Deaths{}Suspicions{}Retries", num_members, budget.num_deaths,
                                 budget.num_suspicions, budget.num_retries);
  for (const auto& [by, accused] : accusations) name += fmt::format("Then{}Accuses{}", by, accused);
  return name;
}

class MembershipAgreementWorlds : public ::testing::TestWithParam<WorldCase> {};

TEST_P(MembershipAgreementWorlds, LivingMembersDecideOneView) {
  const auto& [num_members, budget, accusations] = GetParam();
  const bool may_leave_out = budget.num_suspicions + budget.num_retries > 0 || !accusations.empty();
  const std::size_t num_worlds = explore(
      World(num_members, budget, accusations), [](const World& world) { world.expect_agreement(); },
      [&](const World& world) {
        if (may_leave_out) {
          world.expect_decided_or_without_quorum();
        } else {
          world.expect_all_decided();
        }
      });
  RecordProperty("num_worlds", std::to_string(num_worlds));
  EXPECT_GT(num_worlds, static_cast<std::size_t>(num_members));
}

/// A sanitizer's build takes twenty times as long and finds its faults in few worlds.
std::vector<WorldCase> world_cases() {
  std::vector<WorldCase> cases{{2, {1, 1, 1}}, {3, {0, 0}}, {3, {1, 0}}, {3, {1, 0}, {{0, 1}}}, {3, {0, 0, 1}}};
  if (test::kSanitized) return cases;
  const std::vector<WorldCase> more{{3, {2, 0}},
                                    {3, {1, 1}},
                                    {3, {2, 1}},
                                    {3, {1, 2}},
                                    {3, {1, 0, 1}},
                                    {3, {0, 1, 1}},
                                    {3, {0, 0, 2}},
                                    {4, {1, 0}},
                                    {4, {0, 1}},
                                    {3, {1, 0}, {{1, 0}, {2, 0}}},
                                    {3, {1, 0}, {{1, 2}, {2, 1}}},
                                    {4, {0, 0}, {{1, 0}, {2, 0}}}};
  cases.insert(cases.end(), more.begin(), more.end());
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Worlds, MembershipAgreementWorlds, ::testing::ValuesIn(world_cases()), name_of);

}  // namespace
}  // namespace ferry::membership
