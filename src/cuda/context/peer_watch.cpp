#include "cuda/context/peer_watch.hpp"

#include <new>
#include <utility>

#include "cuda/sync/fault_text.hpp"
#include "node/service_thread.hpp"

namespace ferry::cuda {
namespace {

/// Between looks in groups of one node, whose kernels read the result every 5 ms: less than kLookInterval, since a
/// program may go on as soon as a loss is found (Group::renew). A look is a system call for each other rank.
constexpr std::chrono::milliseconds kLookInNode{5};

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
