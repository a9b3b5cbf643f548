/// Findings of lost and late ranks, and the notices by which ranks share them: every rank of a team names the same one.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <utility>

#include "one_sided/fabric.hpp"
#include "one_sided/notice.hpp"
#include "one_sided/words.hpp"

namespace ferry::one_sided {
namespace {

void store(std::uint64_t& word, std::uint64_t value) { std::atomic_ref(word).store(value, std::memory_order_seq_cst); }

std::size_t place_of(const TeamState& team, int rank) {
  return static_cast<std::size_t>(std::ranges::find(team.ranks, rank) - team.ranks.begin());
}

bool includes(std::span<const int> ranks, int rank) { return std::ranges::find(ranks, rank) != ranks.end(); }

bool is_loss(ErrorCode code) { return code == ErrorCode::kPeerLost || code == ErrorCode::kTransport; }

}  // namespace

Notice& Fabric::notice(int rank) const {
  std::byte* const theirs = memory_of(rank);
  return reinterpret_cast<Notice*>((theirs != nullptr ? theirs : memory_) +
                                   notices_offset(topology_.num_ranks))[static_cast<std::size_t>(rank)];
}

std::size_t Fabric::offset_in_notice(const void* part) const {
  return static_cast<std::size_t>(static_cast<const std::byte*>(part) - memory_);
}

/// A rank that is through has told its mates all that they need of it, and may be gone while they wait for others.
bool Fabric::is_through(const TeamState& team, int rank) const {
  const std::size_t place = place_of(team, rank);
  if (place == team.ranks.size()) return false;
  return load(&notice(rank).met[static_cast<std::size_t>(team.slots[place])]) >= team.number();
}

void Fabric::note_through(const TeamState& team) {
  store(notice(topology_.rank).met[static_cast<std::size_t>(team.my_slot())], team.num_barriers);
}

std::optional<Finding> Fabric::loss_of(int rank) const {
  if (peers_.includes(rank)) {
    const std::string_view loss = peers_.loss_of(rank);
    if (loss.empty()) return std::nullopt;
    return Finding{rank, loss == "has died" ? Fault::kDied : Fault::kLeft};
  }
  if (driver_ == nullptr) return std::nullopt;
  const Status status = driver_->peer_status(rank);
  if (status.ok()) return std::nullopt;
  if (load(&notice(rank).departed) != 0) return Finding{rank, Fault::kLeft};
  return Finding{rank, status.code() == ErrorCode::kTransport ? Fault::kCut : Fault::kGone};
}

/// The finding of a mate that has given up the team's meeting; kGaveUp if all that did name this rank.
std::optional<Finding> Fabric::find_verdict(const TeamState& team) const {
  std::optional<Finding> about_me;
  for (std::size_t place = 0; place < team.ranks.size(); ++place) {
    const int mate = team.ranks[place];
    if (mate == topology_.rank) continue;
    const Verdict verdict = Verdict::of(load(&notice(mate).given_up[static_cast<std::size_t>(team.slots[place])]));
    const auto [culprit, fault] = verdict.finding;
    // A mate that gave up the last meeting does not reach this one.
    const bool is_current = verdict.number == team.number() || verdict.number + 1 == team.number();
    if (!is_current || fault == Fault::kNone || fault >= Fault::kLate) continue;
    if (culprit == topology_.rank) {
      if (!about_me) about_me = Finding{mate, Fault::kGaveUp};
    } else if (includes(team.ranks, culprit)) {
      return verdict.finding;
    }
  }
  return about_me;
}

/// The rank because of which `rank` was lost: the one for which it gave up its last meeting of the team, or the first
/// one that it found lost.
std::optional<Finding> Fabric::cause_of(int rank, std::span<const int> ranks, const TeamState* team) const {
  const Notice& theirs = notice(rank);
  std::array<Verdict, 2> causes{Verdict{}, Verdict::of(load(&theirs.finding))};
  if (team != nullptr) {
    const auto slot = static_cast<std::size_t>(team->slots[place_of(*team, rank)]);
    const Verdict verdict = Verdict::of(load(&theirs.given_up[slot]));
    if (verdict.number > load(&theirs.met[slot])) causes[0] = verdict;
  }
  for (const Verdict& cause : causes) {
    const auto [culprit, fault] = cause.finding;
    if (fault == Fault::kNone || fault > Fault::kLate || culprit == topology_.rank || culprit == rank) continue;
    if (!includes(ranks, culprit) || (team != nullptr && is_through(*team, culprit))) continue;
    return cause.finding;
  }
  return std::nullopt;
}

/// Ranks leave when they have noticed a loss, so one that left is reported only if no other is to blame.
std::optional<Finding> Fabric::find_loss(std::span<const int> ranks, const TeamState* team) const {
  const std::optional<Finding> verdict = team == nullptr ? std::nullopt : find_verdict(*team);
  if (verdict && verdict->fault != Fault::kGaveUp) return verdict;
  std::optional<Finding> left;
  std::optional<Finding> behind;
  for (const int rank : ranks) {
    if (rank == topology_.rank) continue;
    const std::optional<Finding> loss = loss_of(rank);
    if (!loss || (team != nullptr && is_through(*team, rank))) continue;
    if (const std::optional<Finding> cause = cause_of(rank, ranks, team); cause) {
      if (!behind) behind = cause;
    } else if (loss->fault != Fault::kLeft) {
      return loss;
    } else if (!left) {
      left = loss;
    }
  }
  if (left) return left;
  return behind ? behind : verdict;
}

Status Fabric::status_of(const Finding& finding) const {
  const int rank = finding.rank;
  const Fault fault = finding.fault;
  const auto made = [&](ErrorCode code, std::string_view what) {
    const Status seen = driver_ == nullptr || peers_.includes(rank) ? Status() : driver_->peer_status(rank);
    const std::string detail =
        seen.ok() || fault == Fault::kLeft ? std::string() : fmt::format(" ({})", seen.message());
    return Status(code, fmt::format("rank {} {}{}", rank, what, detail), rank);
  };
  switch (fault) {
    case Fault::kNone:
      return {};
    case Fault::kLeft:
      return made(ErrorCode::kPeerLost, "has left");
    case Fault::kDied:
      return made(ErrorCode::kPeerLost, "has died");
    case Fault::kGone:
      return made(ErrorCode::kPeerLost, "is lost");
    case Fault::kCut:
      return made(ErrorCode::kTransport, "is lost");
    case Fault::kLate:
      return made(ErrorCode::kTimeout, "did not respond until another rank's deadline");
    case Fault::kGaveUp:
      return made(ErrorCode::kTransport, "has given up, as a rank has lost this one");
  }
  return {};
}

Status Fabric::presence(std::span<const int> ranks) const {
  const std::optional<Finding> loss = find_loss(ranks, nullptr);
  return loss ? status_of(*loss) : Status();
}

Status Fabric::report_loss(int rank) {
  const std::optional<Finding> loss = loss_of(rank);
  if (!loss) return {};
  note_loss(*loss);
  return status_of(*loss);
}

/// Sets a word of this rank's notice, and its copies on these ranks of other nodes. Never waits: skips a rank to which
/// nothing can be sent now.
void Fabric::tell(std::span<const int> ranks, std::uint64_t& word, std::uint64_t value) {
  store(word, value);
  if (driver_ == nullptr) return;
  const net::AtomicOp op{.kind = net::AtomicOp::Kind::kSet, .offset = offset_in_notice(&word), .operand = value};
  for (const int rank : ranks) {
    if (in_node(rank) || !driver_->peer_status(rank).ok()) continue;
    (void)driver_->try_issue({.kind = NetworkRequest::Kind::kAtomic, .peer = rank, .op = op, .counts = false});
  }
}

void Fabric::note_loss(const Finding& loss) {
  std::uint64_t& mine = notice(topology_.rank).finding;
  const std::uint64_t word = Verdict{.finding = loss}.word();
  std::uint64_t none = 0;
  if (loss.fault >= Fault::kLate || !std::atomic_ref(mine).compare_exchange_strong(none, word)) return;
  tell(all_ranks_, mine, word);
}

void Fabric::announce(const TeamState& team, int awaited) {
  const Announcement made{
      .number = team.number(), .count = ++num_announcements_, .slot = team.my_slot(), .awaited = awaited};
  tell(team.ranks, notice(topology_.rank).waiting, made.word());
}

void Fabric::retract(const TeamState& team) { tell(team.ranks, notice(topology_.rank).waiting, 0); }

/// Follows the announcements from `awaited` to a rank that does not announce that it waits.
int Fabric::find_late(const TeamState& team, int awaited) const {
  int late = awaited;
  for (std::size_t hop = 0; hop < team.ranks.size(); ++hop) {
    const std::size_t place = place_of(team, late);
    if (place == team.ranks.size() || late == topology_.rank) return awaited;
    const std::uint64_t word = load(&notice(late).waiting);
    const Announcement heard = Announcement::of(word);
    const bool is_stale = place < team.stale_announcements.size() && team.stale_announcements[place] == word;
    // A mate may be in the next meeting, or still in the last one.
    const std::uint64_t ahead = (heard.number + 1 - team.number()) & 0xFFFF'FFFF;
    const bool is_waiting = word != 0 && !is_stale && heard.slot == team.slots[place] && ahead <= 2;
    if (!is_waiting || heard.awaited < 0) return late;
    late = heard.awaited;
  }
  return awaited;
}

Status Fabric::conclude(const TeamState& team, std::string_view operation, const Status& status) {
  if (status.ok() || !includes(team.ranks, status.peer())) return status;
  std::uint64_t& given_up = notice(topology_.rank).given_up[static_cast<std::size_t>(team.my_slot())];
  if (status.code() == ErrorCode::kTimeout) {
    // The others read it only if this rank leaves.
    store(given_up, Verdict{team.number(), {status.peer(), Fault::kLate}}.word());
    team.stale_announcements.clear();
    for (const int rank : team.ranks) team.stale_announcements.push_back(load(&notice(rank).waiting));
    return status;
  }
  if (!is_loss(status.code())) return status;
  const std::optional<Finding> loss = find_loss(team.ranks, &team);
  if (!loss) return status;
  note_loss(*loss);
  if (loss->fault < Fault::kLate) tell(team.ranks, given_up, Verdict{team.number(), *loss}.word());
  if (loss->rank == status.peer()) return status;
  const Status named = status_of(*loss);
  return Status(named.code(), fmt::format("{}: {}", operation, named.message()), named.peer());
}

/// Sends each word by a put of its own: peers read the words while they arrive, and larger puts arrive in pieces.
void Fabric::say_goodbye() {
  Notice& mine = notice(topology_.rank);
  store(mine.departed, 1);
  if (driver_ == nullptr) return;
  const std::int64_t start_ns = node::monotonic_ns();
  const auto send = [&](int rank, std::uint64_t& word) {
    const NetworkRequest request{.kind = NetworkRequest::Kind::kPut,
                                 .peer = rank,
                                 .offset = offset_in_notice(&word),
                                 .local = reinterpret_cast<std::byte*>(&word),
                                 .num_bytes = sizeof(word),
                                 .copy_source = true};
    const auto awaited = [rank] { return Awaited{fmt::format("earlier operations to rank {}", rank), rank}; };
    const std::array<int, 1> peer{rank};
    const std::int64_t left_ns = std::max<std::int64_t>(kLastWordsNs - (node::monotonic_ns() - start_ns), 0);
    return wait({.operation = "leave", .what = awaited, .ranks = peer, .timeout_ns = left_ns},
                [&] { return driver_->try_issue(request); })
        .ok();
  };
  for (const int rank : all_ranks_) {
    if (in_node(rank) || !driver_->peer_status(rank).ok()) continue;
    // Other ranks find this one lost in any case, so a word that cannot be sent ends the goodbye to this rank.
    bool is_sent = send(rank, mine.finding);
    for (auto* const of_teams : {&mine.met, &mine.given_up}) {
      for (std::uint64_t& word : *of_teams) is_sent = is_sent && (word == 0 || send(rank, word));
    }
    if (is_sent) (void)send(rank, mine.departed);
  }
}

}  // namespace ferry::one_sided
