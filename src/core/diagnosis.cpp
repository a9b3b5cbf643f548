#include "core/diagnosis.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "core/flight_snapshot.hpp"
#include "core/other_call.hpp"

namespace ferry {
namespace {

/// Reasons of waits that end when the missing rank makes the same call (call/call_sync.cpp, cuda/sync/fault_text.cpp).
bool waits_for_entry(std::string_view reason) {
  return reason == "to make the same call" || reason == "to post its counts";
}

constexpr const char* kBusyGpuText = "; its GPU waits for no rank: other work is in front of the call, or it is stuck";

/// A rank that misses another.
struct Edge {
  const RecordedRank* from = nullptr;
  const RecordedRank* to = nullptr;
  std::string reason;         ///< empty: `from` has failed
  int step = 0;               ///< of the wait
  std::int64_t ended_ns = 0;  ///< time of that failure; 0: `from` still waits
};

/// Latest call that all ranks make together; null: none.
const RecordedCall* last_collective(const RecordedRank& rank) {
  for (auto call = rank.calls.rbegin(); call != rank.calls.rend(); ++call) {
    if (is_collective(call->operation)) return &*call;
  }
  return nullptr;
}

const RecordedCall* find_collective(const RecordedRank& rank, std::int64_t number) {
  for (const RecordedCall& call : rank.calls) {
    if (is_collective(call.operation) && call.number == number) return &call;
  }
  return nullptr;
}

std::int64_t last_number(const RecordedRank& rank) {
  const RecordedCall* const call = last_collective(rank);
  return call != nullptr ? call->number : 0;
}

bool has_failed(const RecordedRank& rank) {
  return !rank.calls.empty() && rank.calls.back().phase == CallPhase::kFailed;
}

class Diagnoser {
 public:
  explicit Diagnoser(const RecordedGroup& group) : group_(group) {
    for (const RecordedRank& rank : group.ranks) ranks_[rank.rank] = &rank;
    for (const RecordedRank& rank : group.ranks) add_edges(rank);
  }

  Diagnosis run() {
    if (std::optional<Diagnosis> other = find_other_call(group_)) return *other;
    if (by_target_.empty()) return without_edges();
    std::optional<Diagnosis> best;
    std::size_t most = 0;
    for (const auto& [rank, edges] : by_target_) {
      Diagnosis cause = judge(edges);
      if (!best || cause.kind < best->kind || (cause.kind == best->kind && edges.size() > most)) {
        best = std::move(cause);
        most = edges.size();
      }
    }
    if (!unknown_.empty() && best->kind >= DiagnosisKind::kSlowLink) return at_other_host();
    return *best;
  }

 private:
  const RecordedRank* find(int rank) const {
    const auto found = ranks_.find(rank);
    return found == ranks_.end() ? nullptr : found->second;
  }

  int node_of(const RecordedRank& rank) const { return rank.rank / std::max(group_.ranks_per_node, 1); }

  void add_edge(Edge edge, int to) {
    if (to == edge.from->rank || to < 0 || to >= group_.num_ranks) return;
    const RecordedRank* const target = find(to);
    if (target == nullptr) {
      unknown_.insert(to);
      return;
    }
    edge.to = target;
    by_target_[to].push_back(std::move(edge));
  }

  void add_edges(const RecordedRank& from) {
    // A wait of a process that has ended, or cannot go on, says nothing about the present.
    const bool has_ended = from.process == ProcessState::kEnded;
    if (from.process == ProcessState::kStopped || (has_ended && !has_failed(from))) return;
    for (const RecordedWait& wait : from.waits) {
      for (const int rank : wait.ranks) add_edge({&from, nullptr, wait.reason, wait.step, 0}, rank);
    }
    if (!from.waits.empty() || !has_failed(from)) return;
    const RecordedCall& call = from.calls.back();
    if (call.code == ErrorCode::kTimeout || call.code == ErrorCode::kPeerLost) {
      add_edge({&from, nullptr, "", 0, call.ended_ns}, call.peer);
    }
  }

  Diagnosis without_edges() const {
    if (!unknown_.empty()) return at_other_host();
    for (const auto& [rank, record] : ranks_) {
      if (record->process == ProcessState::kEnded && !record->has_left && !has_failed(*record)) {
        return {DiagnosisKind::kEnded, rank, -1, record->describe(group_.now_ns)};
      }
    }
    for (const auto& [rank, record] : ranks_) {
      if (record->process == ProcessState::kStopped) {
        return {DiagnosisKind::kStopped, rank, -1, record->describe(group_.now_ns)};
      }
    }
    if (const RecordedRank* const failed = first_failed()) {
      const RecordedCall& call = failed->calls.back();
      const bool blames = call.peer >= 0 && call.peer != failed->rank;
      return {DiagnosisKind::kUnclear, blames ? call.peer : failed->rank, blames ? failed->rank : -1,
              fmt::format("{}{}; no rank waits for another", failed->describe(group_.now_ns),
                          blames ? fmt::format(", an error that names rank {}", call.peer) : "")};
    }
    return {DiagnosisKind::kHealthy, -1, -1, "no rank waits for another, and no rank's last call has failed"};
  }

  /// Rank whose last call was the first to fail; null: no rank's last call has failed.
  const RecordedRank* first_failed() const {
    const RecordedRank* first = nullptr;
    for (const auto& [rank, record] : ranks_) {
      if (!has_failed(*record)) continue;
      if (first == nullptr || record->calls.back().ended_ns < first->calls.back().ended_ns) first = record;
    }
    return first;
  }

  Diagnosis at_other_host() const {
    const std::vector<int> missing(unknown_.begin(), unknown_.end());
    return {DiagnosisKind::kUnclear, missing.front(), -1,
            fmt::format("{} on another host {} missed; run this there too", name_ranks(missing),
                        missing.size() == 1 ? "is" : "are")};
  }

  /// Judges the rank that all of `edges` point at.
  Diagnosis judge(const std::vector<Edge>& edges) const {
    const RecordedRank& target = *edges.front().to;
    std::vector<int> waiting;
    Diagnosis best{DiagnosisKind::kUnclear, target.rank, edges.front().from->rank, ""};
    std::string detail;
    for (const Edge& edge : edges) {
      if (std::ranges::find(waiting, edge.from->rank) == waiting.end()) waiting.push_back(edge.from->rank);
      std::string why;
      const DiagnosisKind kind = classify(edge, &why);
      if (kind >= best.kind && !detail.empty()) continue;
      best.kind = kind;
      best.peer = edge.from->rank;
      detail = std::move(why);
    }
    const bool is_over = edges.front().ended_ns != 0;
    best.text = fmt::format("{}{}; {} {} it", target.describe(group_.now_ns), detail, name_ranks(waiting),
                            is_over               ? "gave up on"
                            : waiting.size() == 1 ? "waits for"
                                                  : "wait for");
    return best;
  }

  DiagnosisKind classify(const Edge& edge, std::string* why) const {
    const RecordedRank& to = *edge.to;
    if (to.process == ProcessState::kEnded && !has_failed(to)) return DiagnosisKind::kEnded;
    if (to.process == ProcessState::kStopped) return DiagnosisKind::kStopped;
    if (to.calls.empty()) {
      *why = "; it has not made the call";
      return DiagnosisKind::kLate;
    }
    const bool waits_for_gpu = to.calls.back().operation == "wait" && to.calls.back().ended_ns == 0;
    if (waits_for_gpu && to.waits.empty()) {
      *why = kBusyGpuText;
      return DiagnosisKind::kBusyGpu;
    }
    const std::int64_t number = last_number(*edge.from);
    const RecordedCall* const theirs = find_collective(to, number);
    const bool came_late = theirs != nullptr && edge.ended_ns != 0 && theirs->called_ns > edge.ended_ns;
    if (last_number(to) < number || came_late) {
      if (!to.waits.empty()) return DiagnosisKind::kUnclear;  // held up itself, by the rank that it waits for
      *why = fmt::format("; it has not made call {}{}", number, came_late ? " in time" : "");
      return DiagnosisKind::kLate;
    }
    if (theirs == nullptr) return DiagnosisKind::kUnclear;  // overwritten
    const bool entry = waits_for_entry(edge.reason);
    const bool apart = node_of(*edge.from) != node_of(to);
    if (theirs->phase == CallPhase::kLaunched && to.waits.empty() && (entry || !apart)) {
      *why = kBusyGpuText;
      return DiagnosisKind::kBusyGpu;
    }
    // The rank has made the call, or has done all of it, and this has not arrived.
    const bool has_done = (entry && theirs->phase >= CallPhase::kEntered) || theirs->phase >= CallPhase::kReturned;
    if (apart && (has_done || is_ahead(to, edge))) {
      *why = fmt::format("; what it sent to rank {} has not arrived over the network", edge.from->rank);
      return DiagnosisKind::kSlowLink;
    }
    return to.waits.empty() ? DiagnosisKind::kInCall : DiagnosisKind::kUnclear;
  }

  /// Whether `rank` waits for the rank that misses it, in the same step of the call or a later one: ranks pass the
  /// steps of a call in the same order, so `rank` has sent what the other misses.
  static bool is_ahead(const RecordedRank& rank, const Edge& edge) {
    return std::ranges::any_of(rank.waits, [&edge](const RecordedWait& wait) {
      return wait.step >= edge.step && std::ranges::find(wait.ranks, edge.from->rank) != wait.ranks.end();
    });
  }

  const RecordedGroup& group_;
  std::map<int, const RecordedRank*> ranks_;
  std::map<int, std::vector<Edge>> by_target_;
  std::set<int> unknown_;  ///< missing ranks without a record
};

}  // namespace

Diagnosis diagnose(const RecordedGroup& group) { return Diagnoser(group).run(); }

std::string_view to_string(DiagnosisKind kind) {
  switch (kind) {
    case DiagnosisKind::kHealthy:
      return "healthy";
    case DiagnosisKind::kEnded:
      return "ended";
    case DiagnosisKind::kStopped:
      return "stopped";
    case DiagnosisKind::kOtherCall:
      return "other_call";
    case DiagnosisKind::kLate:
      return "late";
    case DiagnosisKind::kBusyGpu:
      return "busy_gpu";
    case DiagnosisKind::kSlowLink:
      return "slow_link";
    case DiagnosisKind::kInCall:
      return "in_call";
    case DiagnosisKind::kUnclear:
      return "unclear";
  }
  return "?";
}

}  // namespace ferry
