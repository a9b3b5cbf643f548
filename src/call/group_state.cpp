#include "call/group_state.hpp"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <utility>

namespace ferry::call {
namespace {

constexpr double kNsPerMillisecond = 1e6;
constexpr std::string_view kLostAdvice = "destroy this group and create a new one from the surviving ranks";
constexpr std::string_view kTimeoutAdvice =
    "the rank may be stopped, overloaded, or not calling; destroy this group and create a new one, with a longer "
    "GroupOptions::timeout_ns if it is only slow";

int threads_of_node(const Topology& topology) {
  const int threads_per_rank = topology.num_nodes() > 1 ? 2 : 1;  // the network's proxy
  return topology.ranks_per_node * threads_per_rank;
}

ErrorRecord make_record(ErrorCode code, int culprit, std::string_view message) {
  ErrorRecord record;
  record.code = code;
  record.culprit = culprit;
  const std::size_t length = std::min(message.size(), record.message.size());
  std::copy_n(message.data(), length, record.message.data());
  record.message_bytes = static_cast<std::int32_t>(length);
  return record;
}

std::string_view text_of(const ErrorRecord& record) {
  const auto length = std::clamp<std::int32_t>(record.message_bytes, 0, kErrorMessageBytes);
  return {record.message.data(), static_cast<std::size_t>(length)};
}

}  // namespace

bool cores_suffice_for(int num_threads) {
  cpu_set_t usable;
  // The call fails if there are more processors than fit the set, which is enough for any node.
  return sched_getaffinity(0, sizeof usable, &usable) != 0 || CPU_COUNT(&usable) >= num_threads;
}

GroupState::GroupState(const BackendContext& context, node::Rendezvous rendezvous)
    : topology_(context.topology),
      timeout_ns_(context.options.timeout_ns),
      spins_(cores_suffice_for(threads_of_node(context.topology))),
      peers_(topology_.rank, topology_.node_of(topology_.rank) * topology_.ranks_per_node, std::move(rendezvous)) {}

GroupState::~GroupState() {
  leave();
  // In a broken group, peers that still answer do so soon; there is nothing left to finish with the others.
  if (rails_ != nullptr && !broken_.ok()) rails_->expect_no_answers();
  rails_.reset();
}

void GroupState::leave() {
  peers_.leave();
  if (rails_ != nullptr) rails_->leave();
}

std::string GroupState::describe_call() const {
  if (peers_.call() == 0) return "Group::create";
  return fmt::format("{} (call {})", operation_, peers_.call());
}

std::optional<Verdict> GroupState::reported_verdict() const {
  std::optional<ReportedError> reported = peers_.reported_error();
  if (!reported && rails_ != nullptr) reported = rails_->reported_error();
  if (!reported) return std::nullopt;
  const ErrorRecord& record = reported->record;
  const std::string note = record.culprit == rank() ? fmt::format(" (rank {} gave up on this rank)", reported->reporter)
                                                    : fmt::format(" (reported by rank {})", reported->reporter);
  return Verdict{record.code, record.culprit, std::string(text_of(record)), note};
}

Status GroupState::adopt_reported_error() {
  const std::optional<Verdict> reported = reported_verdict();
  return reported ? fail(reported->code, reported->culprit, reported->message, reported->note) : Status();
}

Status GroupState::check_presence(int rank) const {
  if (!peers_.includes(rank)) return rails_ != nullptr ? rails_->presence(rank) : Status();
  const std::string_view loss = peers_.loss_of(rank);
  return loss.empty() ? Status() : Status(ErrorCode::kPeerLost, std::string(loss), rank);
}

Status GroupState::fail_for_lost(int rank, const Status& presence, std::string_view waiting_for) {
  return fail(presence.code(), rank,
              fmt::format("{}: rank {} {} while this rank waited for it {}; {}", describe_call(), rank,
                          presence.message(), waiting_for, kLostAdvice));
}

/// A missing rank of another node may itself be waiting for a rank of its node, which that node detects first. A
/// missing rank of this node that is blocked may be waiting for another node, and so needs the most patience. In total
/// a wait ends before twice its deadline.
std::int64_t GroupState::patience_ns(const std::vector<int>& missing) const {
  if (rails_ == nullptr) return 0;
  const bool elsewhere =
      std::any_of(missing.begin(), missing.end(), [this](int rank) { return !peers_.includes(rank); });
  if (elsewhere) return timeout_ns_ / 2;
  const bool all_wait =
      std::all_of(missing.begin(), missing.end(), [this](int rank) { return peers_.is_blocked(rank); });
  return all_wait ? timeout_ns_ / 4 * 3 : 0;
}

Status GroupState::fail_for_timeout(const std::vector<int>& missing, std::string_view waiting_for) {
  // A rank that is itself waiting is not the cause; one that neither arrives nor waits is.
  const auto culprit = std::find_if(missing.begin(), missing.end(),
                                    [this](int rank) { return !peers_.includes(rank) || !peers_.is_blocked(rank); });
  const int rank = culprit != missing.end() ? *culprit : missing.empty() ? -1 : missing.front();
  return fail(ErrorCode::kTimeout, rank,
              fmt::format("{}: timed out after {:.0f} ms waiting for rank {} {} ({} of {} ranks missing); {}",
                          describe_call(), static_cast<double>(timeout_ns_) / kNsPerMillisecond, rank, waiting_for,
                          missing.size(), topology_.num_ranks, kTimeoutAdvice));
}

Verdict GroupState::judge(int suspect, std::string_view what) const {
  if (std::optional<Verdict> reported = reported_verdict()) return *std::move(reported);
  for (int rank = peers_.first_rank(); rank < peers_.end_rank(); ++rank) {
    if (rank == peers_.rank()) continue;
    const std::string_view loss = peers_.loss_of(rank);
    if (loss.empty()) continue;
    return {ErrorCode::kPeerLost, rank, fmt::format("{}; rank {} {}; {}", what, rank, loss, kLostAdvice), {}};
  }
  return {ErrorCode::kTimeout, suspect, fmt::format("{}; {}", what, kTimeoutAdvice), {}};
}

Status GroupState::give_up_on(int suspect, std::string_view what) {
  if (!broken_.ok()) return broken_;
  const Verdict verdict = judge(suspect, what);
  return fail(verdict.code, verdict.culprit, verdict.message, verdict.note);
}

void GroupState::report_lost(int suspect, std::string_view what) {
  const std::lock_guard lock(report_mutex_);
  if (reported_) return;
  watched_ = judge(suspect, what);
  peers_.report_error(make_record(watched_->code, watched_->culprit, watched_->message));
  reported_ = true;
}

Status GroupState::fail(ErrorCode code, int culprit, std::string_view message, std::string_view note) {
  if (!broken_.ok()) return broken_;
  const std::lock_guard lock(report_mutex_);
  if (watched_) {
    // What the peers were told is what this rank says.
    broken_ = Status(watched_->code, watched_->message + watched_->note, watched_->culprit);
    return broken_;
  }
  broken_ = Status(code, std::string(message).append(note), culprit);
  const ErrorRecord record = make_record(code, culprit, message);
  peers_.report_error(record);
  reported_ = true;
  if (rails_ != nullptr) rails_->report_error(record);
  return broken_;
}

}  // namespace ferry::call
