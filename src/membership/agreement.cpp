#include "membership/agreement.hpp"

#include <algorithm>
#include <cstddef>

namespace ferry::membership {

Agreement::Agreement(View current, Id self, Report mine)
    : current_(std::move(current)), self_(self), mine_(std::move(mine)) {
  for (const Member& member : current_.members) gone_[member.id] = Gone::kNo;
  advance();
}

void Agreement::receive(Id from, const Message& message) {
  std::visit([this, from](const auto& content) { take(from, content); }, message);
  advance();
}

void Agreement::take(Id from, const Report& report) {
  if (!gone_.contains(from) || from == self_) return;
  if (decided_) {
    outgoing_.push_back({from, Decision{*decided_}});
    return;
  }
  reports_[from] = report;
  // It was only late. Once voters are chosen it stays out.
  if (gone_[from] == Gone::kSilent && from > self_ && !proposed_) gone_[from] = Gone::kNo;
}

void Agreement::take(Id from, const Proposal& proposal) {
  if (from != followed_ || coordinates() || proposal.ballot < mine_.lock) return;
  mine_.lock = proposal.ballot;
  mine_.locked = proposal.view;
  outgoing_.push_back({from, Acknowledgement{proposal.ballot}});
}

void Agreement::take(Id from, const Acknowledgement& acknowledgement) {
  if (!proposed_ || acknowledgement.ballot != proposed_->ballot) return;
  const auto found = has_acknowledged_.find(from);
  if (found != has_acknowledged_.end()) found->second = true;
}

void Agreement::take(Id from, const Decision& decision) {
  if (decided_ || decision.view.epoch <= current_.epoch) return;
  decided_ = decision.view;
  for (const auto& [id, _] : reports_) {
    if (id != self_ && id != from) outgoing_.push_back({id, Decision{*decided_}});
  }
}

void Agreement::note_silent(Id id) {
  if (!reports_.contains(id)) note_gone(id, Gone::kSilent);
}

void Agreement::heed_accusations() {
  heeds_accusations_ = true;
  for (const Id id : mine_.accused) note_silent(id);
  advance();
}

void Agreement::note_departed(Id id) {
  reports_.erase(id);
  if (coordinates()) {
    note_gone(id, Gone::kSilent);
  } else {
    advance();
  }
}

void Agreement::note_gone(Id id, Gone how) {
  const auto found = gone_.find(id);
  if (found == gone_.end() || id == self_) return;
  found->second = std::max(found->second, how);
  advance();
}

void Agreement::advance() {
  if (decided_) return;
  const auto lowest = std::ranges::find_if(gone_, [](const auto& entry) { return entry.second == Gone::kNo; });
  // A rank never holds itself for gone.
  if (lowest->first > followed_) follow(lowest->first);
  if (coordinates()) coordinate();
}

void Agreement::follow(Id id) {
  followed_ = id;
  if (id == self_) {
    reports_[self_] = mine_;
  } else {
    outgoing_.push_back({id, mine_});
  }
}

bool Agreement::is_accused(Id id) const {
  return heeds_accusations_ && std::ranges::any_of(reports_, [id](const auto& entry) {
           return std::ranges::find(entry.second.accused, id) != entry.second.accused.end();
         });
}

std::vector<Id> Agreement::awaited() const {
  std::vector<Id> ids;
  if (proposed_) {
    for (const auto& [id, has_acknowledged] : has_acknowledged_) {
      if (!has_acknowledged) ids.push_back(id);
    }
    return ids;
  }
  for (const auto& [id, gone] : gone_) {
    if (gone == Gone::kNo && !reports_.contains(id) && !is_accused(id)) ids.push_back(id);
  }
  return ids;
}

std::vector<Id> Agreement::possibly_alive() const {
  std::vector<Id> ids;
  for (const auto& [id, gone] : gone_) {
    if (gone != Gone::kDead) ids.push_back(id);
  }
  return ids;
}

bool Agreement::has_quorum(const std::vector<Id>& voters) const {
  if (voters.size() == possibly_alive().size()) return true;
  const std::vector<Member>& members = current_.members;
  if (2 * voters.size() != members.size()) return 2 * voters.size() > members.size();
  return std::ranges::find(voters, members.front().id) != voters.end();
}

int Agreement::num_voters_needed() const { return static_cast<int>(current_.members.size() / 2 + 1); }

void Agreement::coordinate() {
  if (proposed_) {
    const bool has_lost = std::ranges::any_of(has_acknowledged_, [this](const auto& entry) {
      return entry.first != self_ && gone_[entry.first] != Gone::kNo;
    });
    if (!has_lost && !awaited().empty()) return;
    if (!has_lost) {
      decided_ = proposed_->view;
      for (const auto& [id, _] : has_acknowledged_) {
        if (id != self_) outgoing_.push_back({id, Decision{*decided_}});
      }
      return;
    }
    // Only this rank could have decided that view, and it has not.
    proposed_.reset();
  }
  if (!awaited().empty()) return;
  std::vector<Id> voters;
  for (const auto& [id, gone] : gone_) {
    if (gone == Gone::kNo && reports_.contains(id)) voters.push_back(id);
  }
  lacks_quorum_ = !has_quorum(voters);
  if (!lacks_quorum_) propose(std::move(voters));
}

void Agreement::propose(std::vector<Id> voters) {
  const Report* latest = nullptr;
  for (const auto& [id, report] : reports_) {
    if (report.lock.coordinator >= 0 && (latest == nullptr || latest->lock < report.lock)) latest = &report;
  }
  proposed_ = Proposal{{self_, ++round_}, latest != nullptr ? latest->locked : next_view(voters)};
  has_acknowledged_.clear();
  for (const Id id : voters) {
    has_acknowledged_[id] = id == self_;
    if (id != self_) outgoing_.push_back({id, *proposed_});
  }
  if (awaited().empty()) coordinate();
}

View Agreement::next_view(const std::vector<Id>& voters) const {
  View view;
  view.epoch = current_.epoch + 1;
  for (const Id id : voters) {
    const Report& report = reports_.at(id);
    if (report.leaves) continue;
    const bool is_first = view.members.empty();
    view.num_complete_steps =
        is_first ? report.num_complete_steps : std::min(view.num_complete_steps, report.num_complete_steps);
    view.members.push_back(*current_.find(id));
    view.members.back().bootstrap_port = report.bootstrap_port;
  }
  add_joiners(voters, view);
  return view;
}

void Agreement::add_joiners(const std::vector<Id>& voters, View& view) const {
  for (const Id voter : voters) {
    for (Member joiner : reports_.at(voter).joiners) {
      Id lowest_free = 0;
      while (view.find(lowest_free) != nullptr) ++lowest_free;
      if (joiner.id < 0) joiner.id = lowest_free;
      if (view.find(joiner.id) != nullptr) continue;
      const auto after = std::ranges::upper_bound(view.members, joiner.id, {}, &Member::id);
      view.members.insert(after, std::move(joiner));
    }
  }
}

}  // namespace ferry::membership
