#include "cpu/latency/survivors.hpp"

#include <algorithm>

#include "core/log.hpp"
#include "node/futex.hpp"
#include "plan/to_size.hpp"

namespace ferry::cpu {
namespace {

using node::Phase;

/// How often a waiting rank looks for processes that have ended: a system call for each missing rank, of about a
/// microsecond. More often than in other waits (call/wait.cpp), since the others go on as soon as one is found.
constexpr std::int64_t kPresenceIntervalNs = 5'000'000;
/// As in call/silence_watch.hpp: beats per deadline; deadlines for which a rank that beats is waited for; and the
/// longest step of the clock that counts, as a fraction of the deadline, so that a rank that was itself stopped sees
/// the others beat before it masks one.
constexpr std::int64_t kBeatsPerDeadline = 16;
constexpr std::int64_t kPatience = 2;
constexpr std::int64_t kLongestStep = 4;

}  // namespace

Survivors::Survivors(call::CallSync& sync, MaskBoard& board, std::int64_t mask_timeout_ns)
    : sync_(sync),
      board_(board),
      timeout_ns_(mask_timeout_ns),
      descriptors_(to_size(sync.topology().num_ranks)),
      signs_(descriptors_.size()) {}

Status Survivors::begin(const node::CallDescriptor& descriptor) {
  node::Peers& peers = sync_.peers();
  if (!masks_lost_ranks()) {
    Status begun = sync_.begin(descriptor);
    for (int rank = 0; begun.ok() && rank < peers.num_ranks(); ++rank) {
      if (include(rank)) descriptors_[to_size(rank)] = peers.descriptor_of(rank);
    }
    return begun;
  }
  if (!sync_.broken().ok()) return sync_.broken();
  sync_.state().set_operation(to_string(descriptor.record.operation));
  peers.open(descriptor);
  wait(Phase::kDescribed);
  // A rank that continues without this one may have overwritten its descriptor with that of a later call: descriptors
  // are copied first, then checked.
  drop_deserters();
  for (int rank = 0; rank < peers.num_ranks(); ++rank) {
    if (include(rank)) descriptors_[to_size(rank)] = peers.descriptor_of(rank);
  }
  drop_deserters();
  std::vector<const CallRecord*> records(descriptors_.size(), nullptr);
  for (int rank = 0; rank < peers.num_ranks(); ++rank) {
    if (include(rank)) records[to_size(rank)] = &descriptors_[to_size(rank)].record;
  }
  return check_agreement(records);
}

bool Survivors::drop_deserters() {
  bool found = false;
  for (int rank = 0; rank < sync_.peers().num_ranks(); ++rank) {
    if (rank == sync_.rank() || board_.masks(rank) || !board_.masks_this_rank(rank, call())) continue;
    board_.mask(rank, call());
    found = true;
  }
  return found;
}

Status Survivors::finish() {
  sync_.post(Phase::kDone);
  if (masks_lost_ranks()) {
    wait(Phase::kDone);
    return {};
  }
  Status finished = sync_.wait(Phase::kDone);
  // Ranks that gave up do not wait until this one has read their memory.
  return finished.ok() ? sync_.confirm_reads() : finished;
}

void Survivors::update(int rank, bool masked) {
  if (masked) {
    board_.mask(rank, call() + 1);
  } else {
    board_.unmask(rank);
  }
}

void Survivors::query(std::int32_t* out) const {
  for (int rank = 0; rank < sync_.peers().num_ranks(); ++rank) out[rank] = include(rank) ? 0 : 1;
}

void Survivors::wait(Phase phase) {
  node::Peers& peers = sync_.peers();
  std::int64_t last_ns = node::monotonic_ns();
  std::int64_t waited_ns = 0;
  std::int64_t next_look_ns = 0;
  const auto is_missing = [&](int rank) { return include(rank) && !peers.reached(rank, phase); };
  for (Sign& sign : signs_) sign = {};
  while (true) {
    const std::uint32_t rings = peers.doorbell();
    missing_.clear();
    for (int rank = 0; rank < peers.num_ranks(); ++rank) {
      if (rank != sync_.rank() && is_missing(rank)) missing_.push_back(rank);
    }
    if (missing_.empty()) return;
    const std::int64_t now_ns = node::monotonic_ns();
    waited_ns += std::min(now_ns - last_ns, timeout_ns_ / kLongestStep);
    last_ns = now_ns;
    const bool look = waited_ns >= next_look_ns;
    if (look) next_look_ns = waited_ns + kPresenceIntervalNs;
    if (give_up_on_lost(waited_ns, look)) continue;
    peers.beat();
    peers.sleep(rings, static_cast<std::uint32_t>(missing_.size()),
                std::min(kPresenceIntervalNs, timeout_ns_ / kBeatsPerDeadline));
    sync_.state().count_wait(missing_, node::monotonic_ns() - now_ns);
  }
}

bool Survivors::give_up_on_lost(std::int64_t waited_ns, bool look_for_dead) {
  const node::Peers& peers = sync_.peers();
  bool found = false;
  for (const int rank : missing_) {
    Sign& sign = signs_[to_size(rank)];
    if (const std::uint64_t beats = peers.beats_of(rank); beats != sign.beats) sign = {beats, waited_ns, sign.was_lost};
    const bool late = waited_ns - sign.since_ns >= timeout_ns_ || waited_ns >= kPatience * timeout_ns_;
    // A lost rank may have finished its part just before it was found, so its flags are read once more.
    if (late || sign.was_lost) {
      board_.mask(rank, call());
      log_line(LogLevel::kWarn, {sync_.rank(), peers.num_ranks()}, "latency mode masks rank {} in call {}: {}", rank,
               call(), sign.was_lost ? "it has ended, left or given up" : "it was late");
      found = true;
      continue;
    }
    // To see whether a process has ended takes a system call.
    sign.was_lost =
        board_.masks_this_rank(rank, call()) || peers.gave_up(rank) || (look_for_dead && !peers.loss_of(rank).empty());
    found = found || sign.was_lost;
  }
  return found;
}

}  // namespace ferry::cpu
