/// End of the engine: a handshake with each peer, as far as the deadline allows.

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "net/ucx/ucx_engine.hpp"

namespace ferry::net::ucx {
namespace {

using Clock = std::chrono::steady_clock;

/// Time for peers to finish connecting, and for UCX to cancel operations. Cancelling is local work, but UCX does it in
/// steps.
constexpr std::chrono::milliseconds kShutGrace{500};
/// Naps while closing: at most kLongestNapMs if UCX wakes the thread (it may lose a wake-up), otherwise kShortestNapMs.
constexpr int kLongestNapMs = 5;
constexpr int kShortestNapMs = 1;

}  // namespace

template <typename Done>
bool UcxEngine::poll_until(Clock::time_point deadline, Done done) {
  while (!std::ranges::all_of(peers_, [&done](Peer& peer) {
    return peer.connection == nullptr || peer.connection->failure() != UCS_OK || done(peer);
  })) {
    const bool moved = poll();
    if (Clock::now() >= deadline) return false;
    if (!moved) nap();
  }
  return true;
}

/// Sleeps between polls while closing: an unreachable peer may take the whole deadline, during which no core should be
/// busy.
void UcxEngine::nap() {
  pollfd wakes{event_fd(), POLLIN, 0};
  const bool will_be_woken = arm();
  (void)::poll(&wakes, will_be_woken ? 1 : 0, will_be_woken ? kLongestNapMs : kShortestNapMs);
}

/// Peers write to this end's memory as long as they believe that it exists, with some transports without involving this
/// process or the kernel. So close is a handshake: a goodbye, and the peer's answer that it has stopped.
void UcxEngine::leave(std::int64_t timeout_ns) {
  if (!scopes_.is_open()) return;
  events_ = {};
  if (connected_) {
    const auto room = Clock::time_point::max() - Clock::now();
    const auto deadline = Clock::now() + std::min<Clock::duration>(std::chrono::nanoseconds(timeout_ns), room);
    for (Peer& peer : peers_) {
      if (peer.connection != nullptr) peer.connection->begin_flush();
    }
    poll_until(deadline, [](const Peer& peer) { return peer.connection->quiet(); });
    for (Peer& peer : peers_) {
      if (peer.connection == nullptr || peer.answered) continue;
      peer.connection->send_last({.kind = MessageKind::kGoodbye});
      peer.leaving = false;  // the goodbye replaces a farewell
    }
    poll_until(deadline, [](const Peer& peer) { return peer.left && peer.connection->quiet(); });
  } else if (has_been_asked_) {
    let_peers_connect();
  }
  scopes_.stop_receivers();
  drop_connections();
  scopes_.close();
  peers_.clear();
  peers_.resize(static_cast<std::size_t>(options_.num_peers));
}

/// Lets peers finish the connections that they have begun to an end that does not connect itself: UCX may end a process
/// whose peer closes its sockets meanwhile. Does not if descriptors are short: UCX ends this process if those for the
/// peers' connections run out.
void UcxEngine::let_peers_connect() {
  descriptors_.give_back();
  if (!descriptors_.reserve(descriptors_of_connections(peers_.size() - 1)).ok()) return;
  const auto deadline =
      Clock::now() + std::min<Clock::duration>(kShutGrace, std::chrono::nanoseconds(options_.timeout_ns));
  while (Clock::now() < deadline) {
    if (!scopes_.progress()) nap();
  }
}

/// Cancels all operations in flight.
void UcxEngine::drop_connections() {
  descriptors_.give_back();
  for (Peer& peer : peers_) {
    if (peer.connection != nullptr) peer.connection->shut();
  }
  const auto deadline = Clock::now() + kShutGrace;
  const auto all_shut = [this] {
    return std::ranges::all_of(
        peers_, [](const Peer& peer) { return peer.connection == nullptr || peer.connection->is_shut(); });
  };
  while (!all_shut() && Clock::now() < deadline) scopes_.progress();
  for (Peer& peer : peers_) {
    if (peer.connection == nullptr) continue;
    peer.connection->release_key();
    dropped_.push_back(std::move(peer.connection));
  }
}

}  // namespace ferry::net::ucx
