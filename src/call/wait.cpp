#include "call/wait.hpp"

#include <algorithm>
#include <utility>

#include "node/futex.hpp"

namespace ferry::call {
namespace {

/// Polls before a waiting rank sleeps, if every rank has a core. A few microseconds: enough if the peer is nearly done.
/// If ranks share cores, each poll takes time from the rank being waited for: on 2 cores with 8 ranks the rings of two
/// nodes carried 9.0 GB/s over shared memory without and 6.2 GB/s with it (benchmarks/rail_stage.cpp).
constexpr int kNumSpins = 100;

/// Consecutive idle polls that network progress may cause before the rank reads the clock and checks its peers.
constexpr int kNumNetworkTurns = 100;

/// Interval at which a waiting rank checks whether its peers are alive: a few checks a second per rank cost nothing,
/// and a dead peer is noticed long before any sensible deadline.
constexpr std::int64_t kPresenceIntervalNs = 20'000'000;

void relax_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

Wait::Wait(GroupState& state, std::string_view waiting_for, std::int64_t longest_sleep_ns)
    : state_(state),
      waiting_for_(waiting_for),
      longest_sleep_ns_(longest_sleep_ns),
      watch_(state.wait_memory().watch),
      missing_(state.wait_memory().missing) {
  state_.peers().recorder().count_wait();
}

void Wait::progressed() {
  if (state_.has_rails()) state_.rails().progress();
  state_.count_progress();
  num_idle_ = 0;
  watching_ = false;
}

/// Whether to poll again instead of sleeping.
bool Wait::poll_again() {
  network_moved_ = state_.has_rails() && state_.rails().progress();
  if (state_.spins() && ++num_idle_ <= kNumSpins) {
    relax_core();
    return true;
  }
  if (network_moved_ && ++num_network_turns_ <= kNumNetworkTurns) return true;
  num_network_turns_ = 0;
  return false;
}

Status Wait::sleep_or_fail() {
  if (Status status = state_.adopt_reported_error(); !status.ok()) return status;
  const std::int64_t now_ns = node::monotonic_ns();
  const std::int64_t beat_in_ns = state_.beat_if_due(now_ns);
  if (!watching_) watch_.restart(now_ns);
  watching_ = true;
  show(now_ns);
  if (!std::exchange(has_slept_, true)) state_.expect_wait(now_ns);
  if (now_ns >= next_check_ns_) {
    const int suspect = lost_rank_;
    if (Status status = check_lost(); !status.ok()) return status;
    // The rank may have finished its part just before it was lost: poll once more.
    if (lost_rank_ != suspect && lost_rank_ >= 0) return {};
    next_check_ns_ = now_ns + kPresenceIntervalNs;
  }
  if (Status status = state_.check_interrupt(now_ns); !status.ok()) return status;
  if (watch_.due(now_ns)) {
    const auto verdict = watch_.observe(missing_, [this](int rank) { return state_.sign_of(rank); });
    if (verdict.culprit >= 0) return state_.fail_for_timeout(verdict, missing_.size(), waiting_for_);
  }
  // Network progress may have brought the awaited data: poll before sleeping.
  if (!network_moved_) {
    sleep(std::min({beat_in_ns, watch_.due_in_ns(), next_check_ns_ - now_ns, longest_sleep_ns_}));
    state_.count_wait(missing_, node::monotonic_ns() - now_ns);
  }
  return {};
}

/// Shows the wait in the flight record when it begins and when ranks have arrived since.
void Wait::show(std::int64_t now_ns) {
  if (missing_.size() == num_shown_missing_) return;
  if (shown_since_ns_ == 0) shown_since_ns_ = now_ns;
  num_shown_missing_ = missing_.size();
  state_.show_wait(missing_, waiting_for_, shown_since_ns_);
}

/// Remembers a missing rank that is lost; fails if it was remembered before.
Status Wait::check_lost() {
  for (const int rank : missing_) {
    const Status presence = state_.check_presence(rank);
    if (presence.ok()) continue;
    if (rank == lost_rank_) return state_.fail_for_lost(rank, presence, waiting_for_);
    lost_rank_ = rank;
    return {};
  }
  lost_rank_ = -1;
  return {};
}

void Wait::sleep(std::int64_t timeout_ns) {
  // While this thread drives the network it needs to wake only for rail peers; errors inside the node are found at the
  // next check.
  if (state_.has_rails() && state_.rails().sleep(timeout_ns)) return;
  // Over several nodes any ring of the doorbell may be from the network.
  const auto num_rings = !state_.has_rails() ? std::max<std::size_t>(missing_.size(), 1) : std::size_t{1};
  state_.peers().sleep(rings_, static_cast<std::uint32_t>(num_rings), timeout_ns);
}

}  // namespace ferry::call
