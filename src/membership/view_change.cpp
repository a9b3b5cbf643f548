#include "membership/view_change.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "bootstrap/errors.hpp"

namespace ferry::membership {
namespace {

using bootstrap::Deadline;

/// A coordinator shows several times within its followers' patience that it lives, and not so often that thousands of
/// followers load it.
constexpr std::int64_t kBeatsWithinPatience = 8;
constexpr std::int64_t kMaxBeatNs = kNsPerSecond;

/// How often the program is asked whether to go on: as often as a group's calls ask.
constexpr std::int64_t kAskNs = 100'000'000;

/// Time for accused members to come. A rank that was late for a call is told so by the others' error, in that call or
/// the next; a rank that is stopped delays the others by this time.
constexpr std::int64_t kGraceNs = 10'000'000;

std::int64_t beat_ns(std::int64_t timeout_ns) { return std::min(timeout_ns / kBeatsWithinPatience, kMaxBeatNs); }

}  // namespace

ViewChange::ViewChange(const ViewChangeParams& params)
    : params_(params),
      agreement_(params.agreement),
      followed_(-1),
      patience_(Deadline::after(params.timeout_ns)),
      grace_(Deadline::after(kGraceNs)),
      quorum_time_(patience_),
      next_beat_(Deadline::after(0)) {}

Result<View> ViewChange::run(std::vector<Endpoint::Arrival> arrivals) {
  arrived_ = std::move(arrivals);
  Result<View> next = carry_on();
  for (const auto& [id, reporter] : reporters_) {
    // Those that have no answer report again when this member comes again.
    if (next.ok()) {
      params_.endpoint.dismiss(reporter.key);
    } else {
      params_.endpoint.close(reporter.key);
    }
  }
  later_.insert(later_.end(), arrived_.begin(), arrived_.end());
  return next;
}

Result<View> ViewChange::carry_on() {
  for (;;) {
    for (const Endpoint::Arrival& arrival : std::exchange(arrived_, {})) take(arrival);
    if (Status status = drive_links(); !status.ok()) return status;
    check_times();
    send_outgoing();
    update_links();
    if (agreement_.decided()) break;
    if (Status status = check_quorum(); !status.ok()) return status;
    if (params_.interrupted && params_.interrupted()) return interrupt();
    if (Status status = wait(); !status.ok()) return status;
  }
  return *agreement_.decided();
}

void ViewChange::take(const Endpoint::Arrival& arrival) {
  const Id from = static_cast<Id>(arrival.from);
  if (!arrival.letter) {
    take_closed(arrival);
    return;
  }
  const Letter& letter = *arrival.letter;
  if (std::holds_alternative<Join>(letter.content)) {
    later_.push_back(arrival);
    return;
  }
  if (letter.view.epoch > params_.current.epoch) {
    agreement_.receive(from, Decision{letter.view});
    if (!std::holds_alternative<Decision>(letter.content)) later_.push_back(arrival);
    return;
  }
  if (letter.view.epoch < params_.current.epoch) {
    params_.endpoint.send(arrival.key, params_.current, Decision{params_.current});
    params_.endpoint.dismiss(arrival.key);
    return;
  }
  if (const auto* report = std::get_if<Report>(&letter.content)) {
    reporters_[from] = {.key = arrival.key, .is_closed = false};
    agreement_.receive(from, *report);
  } else if (std::holds_alternative<Promise>(letter.content) ||
             std::holds_alternative<Acknowledgement>(letter.content)) {
    const auto reporter = reporters_.find(from);
    if (reporter == reporters_.end() || reporter->second.key != arrival.key) return;
    if (const auto* promise = std::get_if<Promise>(&letter.content)) agreement_.receive(from, *promise);
    if (const auto* answer = std::get_if<Acknowledgement>(&letter.content)) agreement_.receive(from, *answer);
  } else if (std::holds_alternative<Hail>(letter.content)) {
    // A member that still forms a group of the current view learns that this one wants the next.
    params_.endpoint.send(arrival.key, params_.current, Beat{});
  }
}

void ViewChange::take_closed(const Endpoint::Arrival& arrival) {
  const auto found = reporters_.find(static_cast<Id>(arrival.from));
  if (found != reporters_.end() && found->second.key == arrival.key) {
    found->second.is_closed = true;
  } else {
    later_.push_back(arrival);
  }
}

void ViewChange::update_links() {
  const Id followed = agreement_.followed();
  if (followed != followed_) {
    followed_ = followed;
    followed_is_here_ = false;
    links_.clear();
    patience_ = quorum_time_ = Deadline::after(params_.timeout_ns);
  }
  std::vector<Id> wanted;
  if (!agreement_.coordinates()) {
    wanted.push_back(followed);
  } else {
    // Whether members live that have not come, and those whose connection has ended.
    for (const Id id : agreement_.possibly_alive()) {
      const auto reporter = reporters_.find(id);
      const bool is_here = reporter != reporters_.end() && !reporter->second.is_closed;
      if (id != params_.self && !is_here) wanted.push_back(id);
    }
  }
  std::erase_if(links_, [&](const auto& entry) { return std::ranges::find(wanted, entry.first) == wanted.end(); });
  const Caller caller{static_cast<std::uint32_t>(params_.self), params_.secret};
  for (const Id id : wanted) {
    const auto [at, is_new] = links_.try_emplace(id, *params_.current.find(id), caller);
    if (!is_new) continue;
    const Content opening = agreement_.coordinates() ? Content(Hail{}) : Content(agreement_.mine());
    at->second.open_with(params_.current, opening);
    at->second.advance();
  }
}

Status ViewChange::drive_links() {
  std::vector<Id> ids;
  for (const auto& [id, _] : links_) ids.push_back(id);
  for (const Id id : ids) {
    MemberLink& link = links_.at(id);
    link.advance();
    for (Letter& letter : link.take_letters()) {
      if (id == followed_) {
        followed_is_here_ = true;
        patience_ = Deadline::after(params_.timeout_ns);
      }
      if (letter.view.epoch > params_.current.epoch) {
        agreement_.receive(id, Decision{letter.view});
      } else if (const auto* prepare = std::get_if<Prepare>(&letter.content)) {
        agreement_.receive(id, *prepare);
      } else if (const auto* proposal = std::get_if<Proposal>(&letter.content)) {
        agreement_.receive(id, *proposal);
      }
    }
    if (Status status = check_link(id, link); !status.ok()) return status;
  }
  return {};
}

Status ViewChange::check_link(Id id, const MemberLink& link) {
  if (!link.refusal().ok()) return link.refusal();
  const auto reporter = reporters_.find(id);
  const bool has_closed = reporter != reporters_.end() && reporter->second.is_closed;
  if (link.is_dead()) {
    if (has_closed) reporters_.erase(reporter);
    agreement_.note_dead(id);
  } else if (has_closed && link.is_heard()) {
    reporters_.erase(reporter);
    agreement_.note_departed(id);
  }
  return {};
}

void ViewChange::send_outgoing() {
  for (const Agreement::Outgoing& outgoing : agreement_.take_outgoing()) {
    const Content content = std::visit([](const auto& part) { return Content(part); }, outgoing.message);
    const auto reporter = reporters_.find(outgoing.to);
    if (reporter != reporters_.end() && outgoing.to != agreement_.followed()) {
      params_.endpoint.send(reporter->second.key, params_.current, content);
    } else if (const auto link = links_.find(outgoing.to); link != links_.end()) {
      link->second.send(params_.current, content);
    }
  }
}

void ViewChange::check_times() {
  if (agreement_.coordinates() && next_beat_.expired()) {
    next_beat_ = Deadline::after(beat_ns(params_.timeout_ns));
    for (const auto& [_, reporter] : reporters_) params_.endpoint.send(reporter.key, params_.current, Beat{});
  }
  if (!grace_is_over_ && grace_.expired()) {
    grace_is_over_ = true;
    agreement_.heed_accusations(followed_is_here_);
  }
  // Voters have as long to answer as members had to come.
  if (agreement_.num_ballots() != num_ballots_) {
    num_ballots_ = agreement_.num_ballots();
    patience_ = Deadline::after(params_.timeout_ns);
  }
  if (!patience_.expired()) return;
  patience_ = Deadline::after(params_.timeout_ns);
  if (!agreement_.coordinates()) {
    agreement_.note_silent(agreement_.followed());
    return;
  }
  for (const Id id : agreement_.awaited()) {
    if (reporters_.contains(id)) {
      agreement_.note_departed(id);
    } else {
      agreement_.note_silent(id);
    }
  }
}

Deadline ViewChange::next_time() const {
  Deadline next = params_.endpoint.next_deadline(patience_);
  if (!grace_is_over_) next = earlier(next, grace_);
  if (agreement_.lacks_quorum()) next = earlier(next, quorum_time_);
  if (agreement_.coordinates()) next = earlier(next, next_beat_);
  for (const auto& [_, link] : links_) next = earlier(next, link.next_deadline());
  return params_.interrupted ? earlier(next, Deadline::after(kAskNs)) : next;
}

Status ViewChange::wait() {
  std::vector<pollfd> entries;
  for (const auto& [_, link] : links_) entries.push_back(link.entry());
  const std::size_t num_links = entries.size();
  params_.endpoint.add_poll_entries(&entries);
  if (Status status = bootstrap::wait_until_ready(entries, next_time()); !status.ok()) return status;
  return params_.endpoint.serve(std::span(entries).subspan(num_links), &arrived_);
}

Status ViewChange::check_quorum() const {
  if (!agreement_.coordinates() || !agreement_.lacks_quorum() || !agreement_.awaited().empty()) return {};
  // Members that have not come may come yet, or prove to be dead.
  if (!quorum_time_.expired()) return {};
  return Status(
      ErrorCode::kTimeout,
      fmt::format("Membership::next_view: too few members are here: some live and did not come within {}, and without "
                  "them {} of the {} members of view {} are needed; end processes that are stuck, or call next_view "
                  "again when they come",
                  bootstrap::format_seconds(params_.timeout_ns), agreement_.num_voters_needed(),
                  params_.current.members.size(), params_.current.epoch),
      -1);
}

Status ViewChange::interrupt() const {
  return Status(ErrorCode::kPeerLost,
                "Membership::next_view: this rank was told to give up by MembershipOptions::interrupted", params_.rank);
}

}  // namespace ferry::membership
