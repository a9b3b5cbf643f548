#include "call/group_state.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "core/cores.hpp"
#include "core/flight_snapshot.hpp"
#include "node/futex.hpp"
#include "plan/to_size.hpp"

namespace ferry::call {
namespace {

/// Number of turns between two looks at the clock on a rank that always has work: reading it takes tens of nanoseconds,
/// a turn microseconds.
constexpr std::uint64_t kProgressPerClock = 64;
/// Interval at which GroupOptions::interrupted is called: short for a person who presses Ctrl-C, and cheap for a
/// program that must take a lock to answer.
constexpr std::int64_t kInterruptIntervalNs = 100'000'000;
constexpr double kNsPerMillisecond = 1e6;
constexpr std::string_view kLostAdvice = "destroy this group and create a new one from the surviving ranks";
constexpr std::string_view kTimeoutAdvice =
    "the rank may be stopped, overloaded, or not calling; destroy this group and create a new one, with a longer "
    "GroupOptions::timeout_ns if it is only slow";

int threads_of_node(const Topology& topology) {
  const int threads_per_rank = topology.num_nodes() > 1 ? 2 : 1;  // the second thread is the network's proxy
  return topology.ranks_per_node * threads_per_rank;
}

Verdict own_verdict(ErrorCode code, int culprit, std::string_view message) {
  Verdict verdict;
  verdict.message = message;
  ErrorRecord& record = verdict.record;
  record.code = code;
  record.culprit = culprit;
  const std::size_t length = std::min(message.size(), record.message.size());
  std::copy_n(message.data(), length, record.message.data());
  record.message_bytes = static_cast<std::int32_t>(length);
  return verdict;
}

}  // namespace

GroupState::GroupState(const BackendContext& context, node::Rendezvous rendezvous)
    : GroupState(context, rendezvous.group_id, std::move(rendezvous)) {}

GroupState::GroupState(const BackendContext& context, std::uint64_t group_id, node::Rendezvous rendezvous)
    : topology_(context.topology),
      timeout_ns_(context.options.timeout_ns),
      interrupted_(context.options.interrupted),
      spins_(cores_suffice_for(threads_of_node(context.topology))),
      peers_(topology_.rank, topology_.node_of(topology_.rank) * topology_.ranks_per_node, std::move(rendezvous)),
      wait_memory_{{}, SilenceWatch(topology_.num_ranks, timeout_ns_)},
      wait_times_ns_(context.earlier_waits_ns) {
  wait_times_ns_.resize(to_size(topology_.num_ranks));
  peers_.recorder().open({group_id, topology_.rank, topology_.num_ranks, topology_.ranks_per_node, timeout_ns_});
}

GroupState::~GroupState() {
  leave();
  // In a broken group, peers that still answer do so soon; with the others nothing remains to be finished.
  if (rails_ != nullptr && (!broken_.ok() || !is_created_)) rails_->expect_no_answers();
  rails_.reset();
}

void GroupState::leave() {
  peers_.leave();
  if (rails_ != nullptr) rails_->leave();
}

std::string GroupState::describe_call() const {
  if (peers_.call() == 0) return "Group::create";
  return fmt::format("{} (call {})", operation_, peers_.recorder().number());
}

std::string GroupState::last_seen_of(int rank) const {
  if (!peers_.includes(rank) || rank == peers_.rank() || peers_.peer(rank).is_absent) return "";
  constexpr std::size_t kFewCalls = 4;  // among which is one that all ranks make
  const FlightRecord& record = peers_.flight_of(rank);
  if (record.rank != rank) return "";
  return "; " + take_snapshot(record, kFewCalls).describe(node::monotonic_ns());
}

std::optional<ReportedError> GroupState::find_reported_error() const {
  std::optional<ReportedError> reported = peers_.reported_error();
  if (!reported && rails_ != nullptr) reported = rails_->reported_error();
  return reported;
}

Status GroupState::adopt_reported_error() {
  if (!broken_.ok()) return broken_;
  const std::optional<ReportedError> reported = find_reported_error();
  return reported ? break_group(adopted(*reported)) : Status();
}

Status GroupState::confirm_reads() {
  if (!broken_.ok()) return broken_;
  // The fence orders the reads of the peers' memory before the read of their errors.
  std::atomic_thread_fence(std::memory_order_acquire);
  const std::optional<ReportedError> reported = peers_.error_in_this_call();
  return reported ? break_group(adopted(*reported)) : Status();
}

Verdict GroupState::adopted(const ReportedError& reported) const {
  Verdict verdict{reported.record, {}};
  ErrorRecord& record = verdict.record;
  record.message_bytes = std::clamp<std::int32_t>(record.message_bytes, 0, kErrorMessageBytes);
  verdict.message.assign(record.message.data(), static_cast<std::size_t>(record.message_bytes));
  verdict.message += record.culprit == rank() ? fmt::format(" (rank {} gave up on this rank)", reported.reporter)
                                              : fmt::format(" (reported by rank {})", reported.reporter);
  return verdict;
}

Status GroupState::check_presence(int rank) const {
  if (!peers_.includes(rank)) return rails_ != nullptr ? rails_->presence(rank) : Status();
  const std::string_view loss = peers_.loss_of(rank);
  return loss.empty() ? Status() : Status(ErrorCode::kPeerLost, std::string(loss), rank);
}

Status GroupState::fail_for_lost(int rank, const Status& presence, std::string_view waiting_for) {
  return fail(presence.code(), rank,
              fmt::format("{}: rank {} {} while this rank waited for it {}{}; {}", describe_call(), rank,
                          presence.message(), waiting_for, last_seen_of(rank), kLostAdvice));
}

void GroupState::expect_wait(std::int64_t now_ns) { next_question_ns_ = now_ns + kInterruptIntervalNs; }

Status GroupState::ask_for_interrupt(std::int64_t now_ns, std::string_view call) {
  next_question_ns_ = now_ns + kInterruptIntervalNs;
  if (!interrupted_()) return {};
  return fail(ErrorCode::kPeerLost, rank(),
              fmt::format("{}: rank {} waits no longer, as its program asked (GroupOptions::interrupted); destroy the "
                          "group on every rank",
                          call.empty() ? describe_call() : call, rank()));
}

void GroupState::count_progress() {
  peers_.count_progress();
  // Node peers read the progress word itself. A rank that has work in every turn must notify its rail peers.
  if (rails_ != nullptr && peers_.progress_of(rank()) % kProgressPerClock == 0) beat_if_due(node::monotonic_ns());
}

std::int64_t GroupState::beat_if_due(std::int64_t now_ns) {
  if (now_ns >= next_beat_ns_) {
    peers_.beat();
    if (rails_ != nullptr) rails_->beat(peers_.progress_of(rank()));
    next_beat_ns_ = now_ns + wait_memory_.watch.interval_ns();
  }
  return next_beat_ns_ - now_ns;
}

Sign GroupState::sign_of(int rank) const {
  if (peers_.includes(rank)) return {peers_.beats_of(rank), peers_.progress_of(rank)};
  const rail::Rails::WaitSign sign = rails_->wait_sign(topology_.node_of(rank));
  return {sign.beats, sign.progress};
}

Status GroupState::fail_for_timeout(const SilenceWatch::Verdict& verdict, std::size_t num_missing,
                                    std::string_view waiting_for) {
  const std::string_view themselves = verdict.is_silent ? "" : ", all of them waiting themselves";
  return fail(
      ErrorCode::kTimeout, verdict.culprit,
      fmt::format("{}: timed out after {:.0f} ms waiting for rank {} {} ({} of {} ranks missing{}){}; {}",
                  describe_call(), static_cast<double>(timeout_ns_) / kNsPerMillisecond, verdict.culprit, waiting_for,
                  num_missing, topology_.num_ranks, themselves, last_seen_of(verdict.culprit), kTimeoutAdvice));
}

Verdict GroupState::judge(int suspect, std::string_view what) const {
  if (const std::optional<ReportedError> reported = find_reported_error()) return adopted(*reported);
  for (int rank = peers_.first_rank(); rank < peers_.end_rank(); ++rank) {
    if (rank == peers_.rank()) continue;
    if (!peers_.was_lost(rank)) continue;
    const std::string_view loss = peers_.loss_of(rank);
    return own_verdict(ErrorCode::kPeerLost, rank,
                       fmt::format("{}; rank {} {}{}; {}", what, rank, loss, last_seen_of(rank), kLostAdvice));
  }
  for (int node = 0; rails_ != nullptr && node < rails_->num_nodes(); ++node) {
    if (node == rails_->node()) continue;
    const int rank = rails_->rank_of(node);
    const Status presence = rails_->presence(rank);
    if (presence.ok()) continue;
    return own_verdict(presence.code(), rank,
                       fmt::format("{}; rank {} {}; {}", what, rank, presence.message(), kLostAdvice));
  }
  if (const Status lost = find_other_loss(); !lost.ok()) {
    return own_verdict(lost.code(), lost.peer(),
                       fmt::format("{}; rank {} {}; {}", what, lost.peer(), lost.message(), kLostAdvice));
  }
  return own_verdict(ErrorCode::kTimeout, suspect,
                     fmt::format("{}{}; {}", what, last_seen_of(suspect), kTimeoutAdvice));
}

void GroupState::watch_others(std::function<Status()> find_lost) {
  const std::lock_guard lock(others_mutex_);
  others_ = std::move(find_lost);
}

Status GroupState::find_other_loss() const {
  const std::lock_guard lock(others_mutex_);
  return others_ ? others_() : Status();
}

Status GroupState::give_up_on(int suspect, std::string_view what) {
  if (!broken_.ok()) return broken_;
  return break_group(judge(suspect, what));
}

void GroupState::report_lost(int suspect, std::string_view what) {
  const std::lock_guard lock(report_mutex_);
  if (reported_) return;
  watched_ = judge(suspect, what);
  peers_.report_error(watched_->record);
  if (rails_ != nullptr) rails_->report_error(watched_->record);
  reported_ = true;
}

bool GroupState::pass_on_error() {
  if (rails_ == nullptr || !find_reported_error()) return false;
  report_lost(rank(), {});  // adopts the reported error
  return true;
}

bool GroupState::someone_gave_up() const {
  return peers_.anyone_gave_up() || (rails_ != nullptr && rails_->reported_error());
}

std::vector<int> GroupState::silent_ranks() const {
  std::vector<int> silent = peers_.ended_ranks();
  if (broken_.code() == ErrorCode::kTimeout) silent.push_back(broken_.peer());
  return silent;
}

bool GroupState::someone_is_lost() const {
  for (int rank = peers_.first_rank(); rank < peers_.end_rank(); ++rank) {
    if (rank != peers_.rank() && peers_.was_lost(rank)) return true;
  }
  for (int node = 0; rails_ != nullptr && node < rails_->num_nodes(); ++node) {
    if (node != rails_->node() && !rails_->presence(rails_->rank_of(node)).ok()) return true;
  }
  return !find_other_loss().ok();
}

Status GroupState::fail(ErrorCode code, int culprit, std::string_view message) {
  if (!broken_.ok()) return broken_;
  if (culprit != rank()) {
    if (Status status = adopt_reported_error(); !status.ok()) return status;
  }
  return break_group(own_verdict(code, culprit, message));
}

Status GroupState::break_group(const Verdict& verdict) {
  const std::lock_guard lock(report_mutex_);
  // Peers and this rank's caller must get the same error.
  const Verdict& told = watched_ ? *watched_ : verdict;
  broken_ = Status(told.record.code, told.message, told.record.culprit);
  if (watched_) return broken_;
  peers_.report_error(verdict.record);
  reported_ = true;
  if (rails_ != nullptr) rails_->report_error(verdict.record);
  return broken_;
}

}  // namespace ferry::call
