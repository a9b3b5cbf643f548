#include "node/crew.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "node/cores.hpp"
#include "node/futex.hpp"

namespace ferry::node {
namespace {

/// Looks at the flags before a waiting rank sleeps, where every rank has a core. A few microseconds: enough when the
/// peer is nearly there. Where ranks share cores each look takes from who is looked for: on 2 cores with 8 ranks the
/// rings of two nodes carried 9.0 GB/s over shared memory without and 6.2 GB/s with it (benchmarks/rail_stage.cpp).
constexpr int kNumSpins = 100;

/// How often a network that moves may leave a task idle before the rank looks at the clock and at its peers.
constexpr int kNumDrives = 100;

int threads_of_node(const Topology& topology) {
  const int threads_per_rank = topology.num_nodes() > 1 ? 2 : 1;  // the network's proxy
  return topology.ranks_per_node * threads_per_rank;
}

/// How often a sleeping rank looks whether its peers still live: a few such looks a second per rank cost nothing, and a
/// dead peer is noticed long before any sensible deadline.
constexpr std::int64_t kLivenessIntervalNs = 20'000'000;

/// Longer than anybody who waits is awake between two sleeps.
constexpr std::int64_t kSecondLookNs = 5'000'000;

constexpr double kNsPerMillisecond = 1e6;

std::string_view name_of(Phase phase) {
  switch (phase) {
    case Phase::kTicket:
      return "to make the same call";
    case Phase::kRails:
      return "to hear of the other nodes' calls";
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
      first_rank_(context.topology.node_of(rank_) * context.topology.ranks_per_node),
      group_size_(context.topology.num_ranks),
      timeout_ns_(context.options.timeout_ns),
      waits_awake_(cores_suffice_for(threads_of_node(context.topology))),
      arena_(std::move(rendezvous.arena)),
      peers_(std::move(rendezvous.peers)) {
  missing_.reserve(peers_.size());
  moves_.assign(peers_.size(), 0);
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
  if (Status status = open(ticket); !status.ok()) return status;
  if (Status status = wait(Phase::kTicket); !status.ok()) return status;
  std::vector<const CallRecord*> records;
  for (int rank = first_rank_; rank < end_rank(); ++rank) records.push_back(&ticket_of(rank).record);
  return check_agreement(records);
}

Status Crew::open(const Ticket& ticket) {
  if (!broken_.ok()) return broken_;
  ++call_;
  operation_ = ticket.record.operation;
  control(rank_).tickets[call_ % 2] = ticket;
  post(Phase::kTicket);
  return {};
}

const Ticket& Crew::ticket_of(int rank) const { return control(rank).tickets[call_ % 2]; }

void Crew::set_staged(const Location& staged) { control(rank_).tickets[call_ % 2].staged = staged; }

void Crew::post(Phase phase) {
  control(rank_).flag(phase).store(call_, std::memory_order_release);
  ring_all(false);
}

void Crew::ring(ControlBlock& theirs, bool force) {
  const std::uint32_t rings = theirs.doorbell.fetch_add(1, std::memory_order_seq_cst) + 1;
  const std::uint32_t wake_at = theirs.wake_at.load(std::memory_order_seq_cst);
  // Ring numbers wrap around; the signed difference orders any two that are closer than 2^31.
  if (force || static_cast<std::int32_t>(rings - wake_at) >= 0) futex_wake_all(theirs.doorbell);
}

void Crew::ring_all(bool force) {
  for (int rank = first_rank_; rank < end_rank(); ++rank) {
    if (rank != rank_) ring(control(rank), force);
  }
}

void Crew::ring_self() { ring(control(rank_), false); }

bool Crew::reached(int rank, Phase phase) const {
  return control(rank).flag(phase).load(std::memory_order_acquire) >= call_;
}

/// Done when all awaited ranks have posted the phase.
class Crew::PhaseTask final : public Task {
 public:
  PhaseTask(const Crew& crew, Phase phase, const std::vector<bool>* awaited)
      : crew_(crew), phase_(phase), awaited_(awaited) {}

  Step step() override {
    for (int rank = crew_.first_rank_; rank < crew_.end_rank(); ++rank) {
      if (lacks(rank)) return Step::kIdle;
    }
    return Step::kDone;
  }
  void list_missing(std::vector<int>* ranks) override {
    for (int rank = crew_.first_rank_; rank < crew_.end_rank(); ++rank) {
      if (lacks(rank)) ranks->push_back(rank);
    }
  }
  std::string describe() const override {
    return fmt::format("{} (call {}): waited for it {}", to_string(crew_.operation_), crew_.call_, name_of(phase_));
  }

 private:
  bool lacks(int rank) const {
    if (awaited_ != nullptr && !(*awaited_)[static_cast<std::size_t>(rank - crew_.first_rank_)]) return false;
    return rank != crew_.rank_ && !crew_.reached(rank, phase_);
  }

  const Crew& crew_;
  Phase phase_;
  const std::vector<bool>* awaited_;
};

Status Crew::wait(Phase phase, const std::vector<bool>* awaited) {
  PhaseTask task(*this, phase, awaited);
  return run(task);
}

Status Crew::run(Task& task) {
  if (!broken_.ok()) return broken_;
  ControlBlock& mine = control(rank_);
  std::int64_t deadline_ns = monotonic_ns() + timeout_ns_;
  std::int64_t next_look_ns = 0;
  bool extended = false;
  int num_looks_at_deadline = 0;
  missing_.clear();
  for (int num_idle = 0, num_drives = 0;;) {
    const std::uint32_t rings = mine.doorbell.load(std::memory_order_seq_cst);
    const Task::Step step = task.step();
    if (!broken_.ok()) return broken_;
    if (step == Task::Step::kDone) break;
    const bool network_moved = others_ != nullptr && others_->drive();
    // From here on this rank has something to do, and a stall would be its own.
    if (network_moved) mine.blocked.store(0, std::memory_order_relaxed);
    if (step == Task::Step::kMoved) {
      mine.moves.fetch_add(1, std::memory_order_relaxed);
      num_idle = 0;
      deadline_ns = 0;  // set anew before the next sleep: the clock is not read while things move
      continue;
    }
    if (waits_awake_ && ++num_idle <= kNumSpins) {
      relax_core();
      continue;
    }
    if (network_moved && ++num_drives <= kNumDrives) continue;
    num_drives = 0;
    if (Status status = adopt_verdict(); !status.ok()) return status;
    const std::int64_t now_ns = monotonic_ns();
    missing_.clear();
    task.list_missing(&missing_);
    if (deadline_ns == 0 || peers_moved()) {
      deadline_ns = now_ns + timeout_ns_;
      extended = false;
    }
    if (now_ns >= next_look_ns) {
      if (Status status = check_liveness(task); !status.ok()) return status;
      next_look_ns = now_ns + kLivenessIntervalNs;
    }
    if (now_ns >= deadline_ns) {
      const std::int64_t patience_ns = extended ? 0 : patience_with_missing_ns();
      // Who waits looks up for a moment now and then: who seems not to is looked at twice.
      if (patience_ns == 0 && (extended || others_ == nullptr || num_looks_at_deadline++ > 0)) return expire(task);
      extended = patience_ns != 0;
      deadline_ns = now_ns + std::max(patience_ns, kSecondLookNs);
    }
    // What moved may be what the task waits for.
    if (!network_moved) sleep(rings, std::min(deadline_ns - now_ns, kLivenessIntervalNs));
  }
  mine.blocked.store(0, std::memory_order_relaxed);
  return {};
}

/// Until somebody rings after the doorbell said `rings`, or the network moves.
void Crew::sleep(std::uint32_t rings, std::int64_t timeout_ns) {
  ControlBlock& mine = control(rank_);
  mine.blocked.store(1, std::memory_order_relaxed);
  // No step of this node is waited for then; who breaks the group is heard at the next look.
  if (others_ != nullptr && others_->sleep(timeout_ns)) return;
  const std::size_t num_rings = std::max<std::size_t>(missing_.size(), 1);
  const bool all_must_ring = others_ == nullptr;  // otherwise any ring may be the network's
  mine.wake_at.store(rings + (all_must_ring ? static_cast<std::uint32_t>(num_rings) : 1U), std::memory_order_seq_cst);
  futex_wait(mine.doorbell, rings, timeout_ns);
  // Whoever was rung and falls in its next step does not wait any more.
  if (mine.doorbell.load(std::memory_order_relaxed) != rings) mine.blocked.store(0, std::memory_order_relaxed);
}

/// Has a peer that is waited for moved on since the last look?
bool Crew::peers_moved() {
  bool moved = false;
  for (int rank : missing_) {
    if (!includes(rank)) continue;
    const std::uint64_t moves = control(rank).moves.load(std::memory_order_relaxed);
    std::uint64_t& seen = moves_[static_cast<std::size_t>(rank - first_rank_)];
    moved = moved || moves != seen;
    seen = moves;
  }
  return moved;
}

/// How much longer to wait where somebody else may know better whom to blame. A rank of another node may itself wait
/// for one of its node, which that node sees first; a rank of this node that waits may wait for one of another node,
/// and so needs the most patience. All of it ends before twice the deadline.
std::int64_t Crew::patience_with_missing_ns() const {
  if (others_ == nullptr) return 0;
  const bool elsewhere = std::any_of(missing_.begin(), missing_.end(), [this](int rank) { return !includes(rank); });
  if (elsewhere) return timeout_ns_ / 2;
  const bool all_wait = std::all_of(missing_.begin(), missing_.end(), [this](int rank) {
    return control(rank).blocked.load(std::memory_order_relaxed) != 0;
  });
  return all_wait ? timeout_ns_ / 4 * 3 : 0;
}

Status Crew::adopt_verdict() {
  const auto adopt = [this](int teller, const Verdict& verdict) {
    const auto length =
        static_cast<std::size_t>(std::clamp<std::int32_t>(verdict.message_bytes, 0, kVerdictMessageBytes));
    const std::string_view text(verdict.message.data(), length);
    const std::string note = verdict.culprit == rank_ ? fmt::format(" (rank {} gave up on this rank)", teller)
                                                      : fmt::format(" (reported by rank {})", teller);
    return fail(verdict.code, verdict.culprit, text, note);
  };
  for (int rank = first_rank_; rank < end_rank(); ++rank) {
    ControlBlock& theirs = control(rank);
    if (rank == rank_ || theirs.verdict_set.load(std::memory_order_acquire) == 0) continue;
    const Verdict verdict = theirs.verdict;
    return adopt(rank, verdict);
  }
  if (others_ == nullptr) return {};
  const std::optional<OtherNodes::Told> told = others_->told();
  return told ? adopt(told->teller, told->verdict) : Status();
}

Status Crew::check_liveness(Task& task) {
  for (const int rank : std::vector<int>(missing_)) {
    std::string what;
    ErrorCode code = ErrorCode::kPeerLost;
    if (includes(rank)) {
      const bool left = control(rank).left.load(std::memory_order_acquire) != 0;
      const bool gone = peer(rank).link != nullptr && peer(rank).link->gone();
      if (!left && !gone) continue;
      what = left ? "has destroyed its group" : "has died";
    } else {
      const Status presence = others_ != nullptr ? others_->presence(rank) : Status();
      if (presence.ok()) continue;
      what = presence.message();
      code = presence.code();
    }
    // It may have finished its part just before it went.
    missing_.clear();
    task.list_missing(&missing_);
    if (std::find(missing_.begin(), missing_.end(), rank) == missing_.end()) continue;
    // It may also have gone because of somebody else, and said so.
    if (Status status = adopt_verdict(); !status.ok()) return status;
    return fail(code, rank,
                fmt::format("{}, rank {} {}; destroy this group and make a new one of the others", task.describe(),
                            rank, what));
  }
  return {};
}

Status Crew::give_up_on(int suspect, std::string_view what) {
  if (!broken_.ok()) return broken_;
  if (Status status = adopt_verdict(); !status.ok()) return status;
  constexpr std::string_view kAdvice = "destroy this group and make a new one of the others";
  for (int rank = first_rank_; rank < end_rank(); ++rank) {
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

Status Crew::expire(const Task& task) {
  // Ranks that wait themselves are not the cause; who neither arrives nor waits is.
  const auto culprit = std::find_if(missing_.begin(), missing_.end(), [this](int rank) {
    return !includes(rank) || control(rank).blocked.load(std::memory_order_relaxed) == 0;
  });
  const int rank = culprit != missing_.end() ? *culprit : missing_.empty() ? -1 : missing_.front();
  return fail(
      ErrorCode::kTimeout, rank,
      fmt::format(
          "{}, rank {} did not in {:.0f} ms ({} of {} ranks missing); it may be stopped, overloaded or never have "
          "called; destroy this group and make a new one, with a longer GroupOptions::timeout_ns if it is "
          "only slow",
          task.describe(), rank, static_cast<double>(timeout_ns_) / kNsPerMillisecond, missing_.size(), group_size_));
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
  if (others_ != nullptr) others_->tell(verdict);
  return broken_;
}

}  // namespace ferry::node
