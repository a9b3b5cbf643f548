#include "cuda/context/peer_watch.hpp"

#include <new>
#include <utility>

#include "cuda/sync/fault_text.hpp"
#include "node/futex.hpp"
#include "node/service_thread.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

/// Between looks in groups of one node, whose kernels read the result every 5 ms: less than kLookInterval, since a
/// program may go on as soon as a loss is found (Group::renew). A look is a system call for each other rank.
constexpr std::chrono::milliseconds kLookInNode{5};

/// Time after which a wait is over whose word has not changed. Waiting kernels write it every 5 to 10 ms, where polls
/// cross a bus more seldom.
constexpr std::int64_t kWaitIsOverNs = 200'000'000;

}  // namespace

PeerWatch::~PeerWatch() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  ending_.notify_one();
  thread_.join();
}

Status PeerWatch::start() {
  if (group_.topology().num_ranks == 1) return {};
  Result<std::thread> thread = node::start_service_thread("ferry-watch", "Group::create", [this] { watch(); });
  if (!thread.ok()) return thread.status();
  thread_ = std::move(*thread);
  return {};
}

void PeerWatch::watch() noexcept {
  std::unique_lock lock(mutex_);
  // No deadline: it watches as long as the group lives, and the destructor ends it.
  const std::chrono::milliseconds interval = rail_link_ == nullptr ? kLookInNode : kLookInterval;
  while (!ending_.wait_for(lock, interval, [this] { return ends_; })) {
    try {
      look();
    } catch (const std::bad_alloc&) {  // no room for the words of a verdict: the next look may find some
    }
  }
}

void PeerWatch::look() {
  look_at_waits();
  if (rail_link_ != nullptr) rail_link_->look();
  if (!told_ && __atomic_load_n(&report_.lost.state, __ATOMIC_ACQUIRE) != 0) {
    group_.report_lost(
        rank_missed(report_.lost, group_.topology()),
        describe_lost(report_.lost, group_.topology(), group_.timeout_ns(), calls_ ? &*calls_ : nullptr));
    told_ = true;
  }
  if (!told_) told_ = group_.pass_on_error();
  look_for_lost_ranks();
  if (stopped_) return;
  bool stop = group_.someone_gave_up();
  if (!stop && group_.someone_is_lost()) {
    // The peer may have left after its last call, whose data reaches this GPU before the next look.
    stop = lost_before_;
    lost_before_ = true;
  }
  if (!stop) return;
  // After the verdict: a host that finds the kernel's report also finds the peer's error or loss.
  __atomic_store_n(&report_.stop.requested, 1, __ATOMIC_RELEASE);
  stopped_ = true;
}

int PeerWatch::rank_of_word(int word_idx) const {
  const Topology& topology = group_.topology();
  if (word_idx >= WaitingWords::kRails) {
    return (word_idx - WaitingWords::kRails) * topology.ranks_per_node + topology.rail_of(topology.rank);
  }
  return word_idx >= WaitingWords::kGroupRanks ? word_idx - WaitingWords::kGroupRanks
                                               : group_.peers().first_rank() + word_idx;
}

void PeerWatch::look_at_waits() {
  const std::int64_t now_ns = node::monotonic_ns();
  std::vector<int> ranks;
  const SeenWait* longest = nullptr;
  for (int i = 0; i < WaitingWords::kNumWords; ++i) {
    SeenWait& seen = waits_[to_size(i)];
    const std::uint64_t word = __atomic_load_n(report_.waiting.words + i, __ATOMIC_RELAXED);
    if (word != seen.word) {
      if (seen.changed_ns == 0) seen.since_ns = now_ns;
      seen.word = word;
      seen.changed_ns = now_ns;
    } else if (now_ns - seen.changed_ns > kWaitIsOverNs) {
      seen.changed_ns = 0;
    }
    if (seen.changed_ns == 0) continue;
    ranks.push_back(rank_of_word(i));
    if (longest == nullptr || seen.since_ns < longest->since_ns) longest = &seen;
  }
  if (ranks == shown_waits_) return;
  const std::string_view reason = longest != nullptr ? awaited_text(WaitingWords::awaited_of(longest->word)) : "";
  group_.peers().recorder().show_wait(kGpuWait, ranks, reason, longest != nullptr ? longest->since_ns : 0);
  shown_waits_ = std::move(ranks);
}

void PeerWatch::look_for_lost_ranks() {
  if (was_lost_.empty()) return;
  const node::Peers& peers = group_.peers();
  for (int rank = peers.first_rank(); rank < peers.end_rank(); ++rank) {
    if (rank == peers.rank() || (peers.loss_of(rank).empty() && !peers.gave_up(rank))) continue;
    // As above: its last data reaches this GPU before the next look.
    if (was_lost_[static_cast<std::size_t>(rank)]) {
      __atomic_store_n(&report_.lost_ranks.lost[rank], 1, __ATOMIC_RELEASE);
    }
    was_lost_[static_cast<std::size_t>(rank)] = true;
  }
}

}  // namespace ferry::cuda
