#include "membership/agreement.hpp"

#include <algorithm>
#include <cstddef>

namespace ferry::membership {

Agreement::Agreement(View current, Id self, Report mine, AgreementMemory memory)
    : current_(std::move(current)),
      self_(self),
      mine_(std::move(mine)),
      memory_(std::move(memory)),
      latest_round_(memory_.promised.round) {
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
  if (gone_[from] == Gone::kSilent && from > self_ && phase_ == Phase::kReports) gone_[from] = Gone::kNo;
}

void Agreement::take(Id from, const Prepare& prepare) {
  if (from != followed_ || coordinates()) return;
  memory_.promised = std::max(memory_.promised, prepare.ballot);
  outgoing_.push_back({from, Promise{memory_.promised, memory_.lock}});
}

void Agreement::take(Id from, const Promise& promise) {
  const auto voter = voters_.find(from);
  if (phase_ != Phase::kPromises || voter == voters_.end() || !is_current(promise.ballot)) return;
  voter->second = {.has_answered = true, .lock = promise.lock};
}

void Agreement::take(Id from, const Proposal& proposal) {
  if (from != followed_ || coordinates()) return;
  if (proposal.ballot >= memory_.promised) {
    memory_.promised = proposal.ballot;
    memory_.lock = {proposal.ballot, proposal.view};
  }
  outgoing_.push_back({from, Acknowledgement{memory_.promised}});
}

void Agreement::take(Id from, const Acknowledgement& acknowledgement) {
  const auto voter = voters_.find(from);
  if (phase_ != Phase::kAcknowledgements || voter == voters_.end() || !is_current(acknowledgement.ballot)) return;
  voter->second.has_answered = true;
}

bool Agreement::is_current(const Ballot& answer) {
  latest_round_ = std::max(latest_round_, answer.round);
  if (answer > ballot_) phase_ = Phase::kReports;
  return answer == ballot_;
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

void Agreement::heed_accusations(bool followed_is_here) {
  heeds_accusations_ = true;
  for (const Id id : mine_.accused) {
    if (id != followed_ || !followed_is_here) note_silent(id);
  }
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
  if (phase_ != Phase::kReports) {
    for (const auto& [id, voter] : voters_) {
      if (!voter.has_answered) ids.push_back(id);
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
  const bool has_lost = std::ranges::any_of(
      voters_, [this](const auto& entry) { return entry.first != self_ && gone_[entry.first] != Gone::kNo; });
  if (phase_ != Phase::kReports && has_lost) phase_ = Phase::kReports;
  if (!awaited().empty()) return;
  switch (phase_) {
    case Phase::kReports: {
      std::vector<Id> voters;
      for (const auto& [id, gone] : gone_) {
        if (gone == Gone::kNo && reports_.contains(id)) voters.push_back(id);
      }
      lacks_quorum_ = !has_quorum(voters);
      if (!lacks_quorum_) prepare(voters);
      return;
    }
    case Phase::kPromises:
      propose();
      return;
    case Phase::kAcknowledgements:
      decided_ = proposed_;
      send_to_voters(Decision{proposed_});
  }
}

void Agreement::send_to_voters(const Message& message) {
  for (auto& [id, voter] : voters_) {
    voter.has_answered = id == self_;
    if (id != self_) outgoing_.push_back({id, message});
  }
}

void Agreement::prepare(const std::vector<Id>& voters) {
  ballot_ = {++latest_round_, self_};
  ++num_ballots_;
  phase_ = Phase::kPromises;
  memory_.promised = ballot_;
  voters_.clear();
  for (const Id id : voters) voters_[id] = {};
  voters_[self_].lock = memory_.lock;
  send_to_voters(Prepare{ballot_});
  if (awaited().empty()) propose();
}

void Agreement::propose() {
  const Lock* latest = nullptr;
  std::vector<Id> ids;
  for (const auto& [id, voter] : voters_) {
    ids.push_back(id);
    if (voter.lock.ballot.round > 0 && (latest == nullptr || latest->ballot < voter.lock.ballot)) latest = &voter.lock;
  }
  proposed_ = latest != nullptr ? latest->view : next_view(ids);
  phase_ = Phase::kAcknowledgements;
  memory_.lock = {ballot_, proposed_};
  send_to_voters(Proposal{ballot_, proposed_});
  if (awaited().empty()) coordinate();
}

View Agreement::next_view(const std::vector<Id>& voters) const {
  View view;
  view.epoch = current_.epoch + 1;
  const bool all_leave = std::ranges::all_of(voters, [this](Id id) { return reports_.at(id).leaves; });
  bool is_first = true;
  for (const Id id : voters) {
    const Report& report = reports_.at(id);
    if (report.leaves && !all_leave) continue;
    view.num_complete_steps =
        is_first ? report.num_complete_steps : std::min(view.num_complete_steps, report.num_complete_steps);
    is_first = false;
    if (all_leave) continue;  // those that join go on from their steps
    view.members.push_back(*current_.find(id));
  }
  add_joiners(voters, view);
  return view;
}

void Agreement::add_joiners(const std::vector<Id>& voters, View& view) const {
  for (const Id voter : voters) {
    for (Member joiner : reports_.at(voter).joiners) {
      const bool is_in = std::ranges::any_of(view.members, [&joiner](const Member& member) {
        return member.port == joiner.port && member.host == joiner.host;
      });
      if (is_in) continue;  // it has asked two members
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
