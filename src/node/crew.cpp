#include "node/crew.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "node/futex.hpp"

namespace ferry::node {
namespace {

/// Looks at the flags before a waiting rank sleeps. A few microseconds: enough when the peer runs on another core and
/// is nearly there, too little to hurt when it needs this core.
constexpr int kNumSpins = 100;

/// How often a sleeping rank looks whether its peers still live: a few such looks a second per rank cost nothing, and a
/// dead peer is noticed long before any sensible deadline.
constexpr std::int64_t kLivenessIntervalNs = 20'000'000;

constexpr double kNsPerMillisecond = 1e6;

std::string_view name_of(Phase phase) {
  switch (phase) {
    case Phase::kTicket:
      return "to make the same call";
    case Phase::kStaged:
      return "to stage its rows";
    case Phase::kDone:
      return "to finish its part";
  }
  return "";
}

void relax_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

Crew::Crew(const BackendContext& context, Rendezvous rendezvous)
    : rank_(context.topology.rank),
      timeout_ns_(context.options.timeout_ns),
      arena_(std::move(rendezvous.arena)),
      peers_(std::move(rendezvous.peers)) {
  missing_.reserve(peers_.size());
}

Crew::~Crew() { leave(); }

void Crew::leave() {
  control(rank_).left.store(1, std::memory_order_release);
  ring_all(true);
}

Location Crew::locate(const std::byte* data, std::int64_t num_rows, std::int64_t row_bytes,
                      std::int64_t stride_bytes) const {
  Location location{Location::Kind::kProcess, reinterpret_cast<std::int64_t>(data), num_rows, row_bytes, stride_bytes};
  const std::int64_t extent_bytes = num_rows == 0 ? 0 : (num_rows - 1) * stride_bytes + row_bytes;
  const ArenaMapping& mine = *arena_->mapping();
  if (data != nullptr && mine.contains(data, static_cast<std::size_t>(extent_bytes))) {
    location.kind = Location::Kind::kArena;
    location.value = data - mine.base();
  }
  return location;
}

bool Crew::reachable(const Location& location, int rank) const {
  return location.kind == Location::Kind::kArena || location.num_rows == 0 || peer(rank).same_process;
}

std::byte* Crew::resolve(const Location& location, int rank, const Extent& extent) const {
  if (location.num_rows < extent.num_rows || location.row_bytes < extent.row_bytes || location.stride_bytes < 0 ||
      location.stride_bytes % kRowGranuleBytes != 0 || location.value % kRowGranuleBytes != 0) {
    return nullptr;
  }
  if (location.kind == Location::Kind::kProcess) {
    return peer(rank).same_process ? reinterpret_cast<std::byte*>(location.value) : nullptr;
  }
  if (location.kind != Location::Kind::kArena) return nullptr;
  const ArenaMapping& theirs = *peer(rank).arena;
  const auto size_bytes = static_cast<std::int64_t>(theirs.size_bytes());
  // Subtractions and a division: none of these can overflow.
  const bool inside = location.value >= 0 && location.value <= size_bytes &&
                      extent.row_bytes <= size_bytes - location.value &&
                      (extent.num_rows <= 1 || location.stride_bytes == 0 ||
                       extent.num_rows - 1 <= (size_bytes - location.value - extent.row_bytes) / location.stride_bytes);
  return inside ? theirs.base() + location.value : nullptr;
}

Status Crew::begin(const Ticket& ticket) {
  if (!broken_.ok()) return broken_;
  ++call_;
  operation_ = ticket.record.operation;
  control(rank_).tickets[call_ % 2] = ticket;
  post(Phase::kTicket);
  if (Status status = wait(Phase::kTicket); !status.ok()) return status;
  std::vector<const CallRecord*> records(peers_.size());
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) records[rank] = &ticket_of(static_cast<int>(rank)).record;
  return check_agreement(records);
}

const Ticket& Crew::ticket_of(int rank) const { return control(rank).tickets[call_ % 2]; }

void Crew::set_staged(const Location& staged) { control(rank_).tickets[call_ % 2].staged = staged; }

void Crew::post(Phase phase) {
  control(rank_).flag(phase).store(call_, std::memory_order_release);
  ring_all(false);
}

void Crew::ring_all(bool force) {
  for (int rank = 0; rank < num_ranks(); ++rank) {
    if (rank == rank_) continue;
    ControlBlock& theirs = control(rank);
    const std::uint32_t rings = theirs.doorbell.fetch_add(1, std::memory_order_seq_cst) + 1;
    const std::uint32_t wake_at = theirs.wake_at.load(std::memory_order_seq_cst);
    // Ring numbers wrap around; the signed difference orders any two that are closer than 2^31.
    if (force || static_cast<std::int32_t>(rings - wake_at) >= 0) futex_wake_all(theirs.doorbell);
  }
}

bool Crew::reached(int rank, Phase phase) const {
  return control(rank).flag(phase).load(std::memory_order_acquire) >= call_;
}

Status Crew::wait(Phase phase, const std::vector<bool>* awaited) {
  if (!broken_.ok()) return broken_;
  ControlBlock& mine = control(rank_);
  const std::int64_t deadline_ns = monotonic_ns() + timeout_ns_;
  std::int64_t next_look_ns = 0;
  for (int spin = 0;; ++spin) {
    const std::uint32_t rings = mine.doorbell.load(std::memory_order_seq_cst);
    missing_.clear();
    for (int rank = 0; rank < num_ranks(); ++rank) {
      if (awaited != nullptr && !(*awaited)[static_cast<std::size_t>(rank)]) continue;
      if (rank != rank_ && !reached(rank, phase)) missing_.push_back(rank);
    }
    if (missing_.empty()) {
      mine.blocked.store(0, std::memory_order_relaxed);
      return {};
    }
    if (spin < kNumSpins) {
      relax_core();
      continue;
    }
    if (Status status = adopt_verdict(); !status.ok()) return status;
    const std::int64_t now_ns = monotonic_ns();
    if (now_ns >= next_look_ns) {
      if (Status status = check_liveness(phase, missing_); !status.ok()) return status;
      next_look_ns = now_ns + kLivenessIntervalNs;
    }
    if (now_ns >= deadline_ns) return expire(phase, missing_);
    mine.blocked.store(1, std::memory_order_relaxed);
    mine.wake_at.store(rings + static_cast<std::uint32_t>(missing_.size()), std::memory_order_seq_cst);
    futex_wait(mine.doorbell, rings, std::min(deadline_ns - now_ns, kLivenessIntervalNs));
  }
}

std::string Crew::describe_call(Phase phase) const {
  return fmt::format("{} (call {}): waited for it {}", to_string(operation_), call_, name_of(phase));
}

Status Crew::adopt_verdict() {
  for (int rank = 0; rank < num_ranks(); ++rank) {
    ControlBlock& theirs = control(rank);
    if (rank == rank_ || theirs.verdict_set.load(std::memory_order_acquire) == 0) continue;
    const Verdict verdict = theirs.verdict;
    const auto length =
        static_cast<std::size_t>(std::clamp<std::int32_t>(verdict.message_bytes, 0, kVerdictMessageBytes));
    const std::string_view text(verdict.message.data(), length);
    const std::string note = verdict.culprit == rank_ ? fmt::format(" (rank {} gave up on this rank)", rank)
                                                      : fmt::format(" (reported by rank {})", rank);
    return fail(verdict.code, verdict.culprit, text, note);
  }
  return {};
}

Status Crew::check_liveness(Phase phase, std::span<const int> missing) {
  for (int rank : missing) {
    const bool left = control(rank).left.load(std::memory_order_acquire) != 0;
    const bool gone = peer(rank).link != nullptr && peer(rank).link->gone();
    if (!left && !gone) continue;
    // It may have finished its part just before it went.
    if (reached(rank, phase)) continue;
    // It may also have gone because of somebody else, and said so.
    if (Status status = adopt_verdict(); !status.ok()) return status;
    return fail(ErrorCode::kPeerLost, rank,
                fmt::format("{}, rank {} {}; destroy this group and make a new one of the others", describe_call(phase),
                            rank, left ? "has destroyed its group" : "has died"));
  }
  return {};
}

Status Crew::give_up_on(int suspect, std::string_view what) {
  if (!broken_.ok()) return broken_;
  if (Status status = adopt_verdict(); !status.ok()) return status;
  constexpr std::string_view kAdvice = "destroy this group and make a new one of the others";
  for (int rank = 0; rank < num_ranks(); ++rank) {
    if (rank == rank_) continue;
    const bool left = control(rank).left.load(std::memory_order_acquire) != 0;
    if (!left && !(peer(rank).link != nullptr && peer(rank).link->gone())) continue;
    return fail(ErrorCode::kPeerLost, rank,
                fmt::format("{}; rank {} {}; {}", what, rank, left ? "has destroyed its group" : "has died", kAdvice));
  }
  return fail(ErrorCode::kTimeout, suspect,
              fmt::format("{}; it may be stopped, overloaded or never have called; {}, with a longer "
                          "GroupOptions::timeout_ns if it is only slow",
                          what, kAdvice));
}

Status Crew::expire(Phase phase, std::span<const int> missing) {
  // Ranks that wait themselves are not the cause; who neither arrives nor waits is.
  const auto culprit = std::find_if(missing.begin(), missing.end(), [this](int rank) {
    return control(rank).blocked.load(std::memory_order_relaxed) == 0;
  });
  const int rank = culprit != missing.end() ? *culprit : missing.front();
  return fail(
      ErrorCode::kTimeout, rank,
      fmt::format(
          "{}, rank {} did not in {:.0f} ms ({} of {} ranks missing); it may be stopped, overloaded or never have "
          "called; destroy this group and make a new one, with a longer GroupOptions::timeout_ns if it is "
          "only slow",
          describe_call(phase), rank, static_cast<double>(timeout_ns_) / kNsPerMillisecond, missing.size(),
          num_ranks()));
}

Status Crew::fail(ErrorCode code, int culprit, std::string_view message, std::string_view note) {
  if (!broken_.ok()) return broken_;
  broken_ = Status(code, std::string(message).append(note), culprit);
  ControlBlock& mine = control(rank_);
  Verdict& verdict = mine.verdict;
  verdict.code = code;
  verdict.culprit = culprit;
  const std::size_t length = std::min(message.size(), verdict.message.size());
  std::copy_n(message.data(), length, verdict.message.data());
  verdict.message_bytes = static_cast<std::int32_t>(length);
  mine.verdict_set.store(1, std::memory_order_release);
  ring_all(true);
  return broken_;
}

}  // namespace ferry::node
